// Interval arithmetic over a q tile x kv tile: what a mask expression can be (may) and must be (must) on all of its elements.
// Sound, not always tight: an unknown value is the whole line. Divisors are positive constants; anything else is unknown.
#pragma once
#include "fg/base.h"

namespace fg {

constexpr long long FAR = 1ll << 61;      // integers beyond are unknown
constexpr long long EXACT = 1ll << 24;    // integers beyond round when they become floats
constexpr int SCAN_LIMIT = 256;           // entries of a captured tensor that are read one by one for its bounds in one tile
constexpr int SPAN_LIMIT = 4096;          // and those whose bounds a table gives

struct Span { long long lo, hi; };        // integer values, inclusive
struct RealSpan { double lo, hi; bool nan; };
struct Truth { bool must, may; };

FG_FN long long clip(long long x) { return x < -FAR ? -FAR : x > FAR ? FAR : x; }
FG_FN Span span_unknown() { return Span{-FAR, FAR}; }
FG_FN bool far(Span a) { return a.lo <= -FAR || a.hi >= FAR; }
FG_FN Span span_add(Span a, Span b) { return Span{a.lo <= -FAR || b.lo <= -FAR ? -FAR : clip(a.lo + b.lo), a.hi >= FAR || b.hi >= FAR ? FAR : clip(a.hi + b.hi)}; }
FG_FN Span span_neg(Span a) { return Span{-a.hi, -a.lo}; }
FG_FN Span span_sub(Span a, Span b) { return span_add(a, span_neg(b)); }
FG_FN Span span_mul(Span a, Span b) {
  const bool small = int_abs(a.lo) < (1ll << 30) && int_abs(a.hi) < (1ll << 30) && int_abs(b.lo) < (1ll << 30) && int_abs(b.hi) < (1ll << 30);
  if (!small) return span_unknown();
  const long long w = a.lo * b.lo, x = a.lo * b.hi, y = a.hi * b.lo, z = a.hi * b.hi;
  return Span{int_min(int_min(w, x), int_min(y, z)), int_max(int_max(w, x), int_max(y, z))};
}
FG_FN Span span_floordiv(Span a, Span b) {
  if (b.lo != b.hi || b.lo <= 0) return span_unknown();
  return Span{a.lo <= -FAR ? -FAR : floordiv(a.lo, b.lo), a.hi >= FAR ? FAR : floordiv(a.hi, b.lo)};
}
FG_FN Span span_ceildiv(Span a, Span b) { return span_neg(span_floordiv(span_neg(a), b)); }
FG_FN Span span_mod(Span a, Span b) {
  if (b.lo != b.hi || b.lo <= 0) return span_unknown();
  if (!far(a) && floordiv(a.lo, b.lo) == floordiv(a.hi, b.lo)) return Span{floormod(a.lo, b.lo), floormod(a.hi, b.lo)};
  return Span{0, b.lo - 1};
}
FG_FN Span span_abs(Span a) {
  if (a.lo >= 0) return a;
  if (a.hi <= 0) return span_neg(a);
  return Span{0, int_max(-a.lo, a.hi)};
}
FG_FN Span span_minimum(Span a, Span b) { return Span{int_min(a.lo, b.lo), int_min(a.hi, b.hi)}; }
FG_FN Span span_maximum(Span a, Span b) { return Span{int_max(a.lo, b.lo), int_max(a.hi, b.hi)}; }
FG_FN Span span_hull(Span a, Span b) { return Span{int_min(a.lo, b.lo), int_max(a.hi, b.hi)}; }
FG_FN Span span_near(Span a) { return Span{clip(a.lo), clip(a.hi)}; }
FG_FN Span span_int(Span a) { return a.lo < -2147483648ll || a.hi > 2147483647ll ? span_unknown() : a; }  // an int32 that may have wrapped around
FG_FN Span span_guard(Span a, Span b) { return far(b) ? span_unknown() : a; }
FG_FN Span span_of(Truth a) { return Span{a.must ? 1 : 0, a.may ? 1 : 0}; }
FG_FN Span span_where(Truth c, Span a, Span b) { return c.must ? a : !c.may ? b : span_hull(a, b); }

// loop bounds: everything up to / from a span, intersection, and hull that forgets an empty side
FG_FN Span span_below(Span a) { return Span{-FAR, a.hi}; }
FG_FN Span span_above(Span a) { return Span{a.lo, FAR}; }
FG_FN Span span_if(Truth a) { return a.may ? span_unknown() : Span{0, -1}; }
FG_FN Span span_meet(Span a, Span b) { return Span{int_max(a.lo, b.lo), int_min(a.hi, b.hi)}; }
FG_FN Span span_join(Span a, Span b) { return a.lo > a.hi ? b : b.lo > b.hi ? a : span_hull(a, b); }
FG_FN Range range_within(Span a, int length) {
  const long long begin = int_max(a.lo, 0ll), end = int_min(a.hi + 1, (long long)length);
  return begin < end ? Range{(int)begin, (int)end} : Range{0, 0};
}

// of a range: its first index >= begin, NOWHERE if there is none; one past its last index < end, 0 if there is none
constexpr int NOWHERE = 0x7fffffff;
FG_FN int first_from(Range a, int begin) { return begin < a.end ? int_max(begin, a.begin) : NOWHERE; }
FG_FN int end_before(Range a, int end) { return a.begin < end ? int_min(end, a.end) : 0; }

FG_FN Truth truth_and(Truth a, Truth b) { return Truth{a.must && b.must, a.may && b.may}; }
FG_FN Truth truth_or(Truth a, Truth b) { return Truth{a.must || b.must, a.may || b.may}; }
FG_FN Truth truth_not(Truth a) { return Truth{!a.may, !a.must}; }
FG_FN Truth truth_xor(Truth a, Truth b) { return truth_or(truth_and(a, truth_not(b)), truth_and(truth_not(a), b)); }
FG_FN Truth truth_where(Truth c, Truth a, Truth b) { return c.must ? a : !c.may ? b : Truth{a.must && b.must, a.may || b.may}; }
FG_FN Truth truth_unknown() { return Truth{false, true}; }
FG_FN Truth truth_le(Span a, Span b) { return Truth{a.hi <= b.lo && !far(a) && !far(b), a.lo <= b.hi}; }
FG_FN Truth truth_lt(Span a, Span b) { return Truth{a.hi < b.lo && !far(a) && !far(b), a.lo < b.hi || a.lo <= -FAR || b.hi >= FAR}; }
FG_FN Truth truth_eq(Span a, Span b) { return Truth{a.lo == a.hi && b.lo == b.hi && a.lo == b.lo && !far(a), a.lo <= b.hi && b.lo <= a.hi}; }
FG_FN Truth truth_ne(Span a, Span b) { return truth_not(truth_eq(a, b)); }

FG_FN RealSpan real_unknown() { return RealSpan{-infinity<double>(), infinity<double>(), true}; }
FG_FN RealSpan real_of(Span a) { return int_max(int_abs(a.lo), int_abs(a.hi)) <= EXACT ? RealSpan{(double)a.lo, (double)a.hi, false} : real_unknown(); }
FG_FN RealSpan real_of(double a) { return RealSpan{a, a, a != a}; }
// comparisons of floating point values, where a NaN makes everything but != false
FG_FN Truth truth_le(RealSpan a, RealSpan b) { return Truth{a.hi <= b.lo && !a.nan && !b.nan, a.lo <= b.hi}; }
FG_FN Truth truth_lt(RealSpan a, RealSpan b) { return Truth{a.hi < b.lo && !a.nan && !b.nan, a.lo < b.hi}; }
FG_FN Truth truth_eq(RealSpan a, RealSpan b) { return Truth{a.lo == a.hi && b.lo == b.hi && a.lo == b.lo && !a.nan && !b.nan, a.lo <= b.hi && b.lo <= a.hi}; }
FG_FN Truth truth_ne(RealSpan a, RealSpan b) {
  const Truth e = truth_eq(a, b);
  return Truth{!e.may && !a.nan && !b.nan, !e.must || a.nan || b.nan};
}

// Bounds of the entries of a captured integer tensor over a box of indices, read one by one: of few entries, else unknown. Each lane may ask for its own box.
struct Axis { Span index; int size; long long stride; };
FG_FN Span axis_box(Axis a) { return Span{clamp_index(a.index.lo, a.size), clamp_index(a.index.hi, a.size)}; }
FG_FN long long box_size() { return 1; }
template <class... More> FG_FN long long box_size(Axis a, More... more) {
  const Span box = axis_box(a);
  return (box.hi - box.lo + 1) * box_size(more...);
}
template <class C> FG_FN void hull_entries(C& low, C& high, const C* data) {
  low = int_min(low, *data);
  high = int_max(high, *data);
}
template <class C, class... More> FG_FN void hull_entries(C& low, C& high, const C* data, Axis first, More... more) {
  const int last = clamp_index(first.index.hi, first.size);
#if !FG_HOST
#pragma unroll 1
#endif
  for (int i = clamp_index(first.index.lo, first.size); i <= last; ++i) hull_entries(low, high, data + i * first.stride, more...);
}
template <class C> FG_FN const C* first_entry(const C* data) { return data; }
template <class C, class... More> FG_FN const C* first_entry(const C* data, Axis a, More... more) {
  return first_entry(data + clamp_index(a.index.lo, a.size) * a.stride, more...);
}
template <class C, class... Axes> FG_FN Span span_scan(const C* data, Axes... axes) {
  C low = *first_entry(data, axes...), high = low;
  hull_entries(low, high, data, axes...);
  return span_near(Span{(long long)low, (long long)high});
}
template <class C, class... Axes> FG_FN Span span_load(const C* data, Axes... axes) {
  return box_size(axes...) > SCAN_LIMIT ? span_unknown() : span_scan(data, axes...);
}

// The same with a table of the least and largest entries per TABLE_BLOCK neighbours along each of the last BLOCKED dimensions (flashgen/tables.py). Along one dimension
// the result is exact: entries beside whole blocks are read one by one. Over two it may be that of the blocks that cover a large box.
constexpr int TABLE_BLOCK = 32;
FG_FN int blocks(int size) { return (size + TABLE_BLOCK - 1) / TABLE_BLOCK; }
template <class C> FG_FN Span span_blocked(const C* data, const C* least, const C* most, Axis x) {
  const int first = clamp_index(x.index.lo, x.size), last = clamp_index(x.index.hi, x.size);
  if (last - first >= SPAN_LIMIT) return span_unknown();
  const int block = (first + TABLE_BLOCK - 1) / TABLE_BLOCK, end = last + 1 == x.size ? blocks(x.size) : (last + 1) / TABLE_BLOCK;  // whole blocks
  const bool some = block < end;
  C low = some ? least[block] : data[first * x.stride], high = some ? most[block] : low;
#if !FG_HOST
#pragma unroll 1
#endif
  for (int i = block + 1; i < end; i += 4) {  // four at once: what a device loads together takes the time of one
#if !FG_HOST
#pragma unroll
#endif
    for (int j = 0; j < 4; ++j) {
      const int at = int_min(i + j, end - 1);
      low = int_min(low, least[at]);
      high = int_max(high, most[at]);
    }
  }
#if !FG_HOST
#pragma unroll 1
#endif
  for (int i = first; i <= last; ++i) {
    if (some && i == block * TABLE_BLOCK) i = end * TABLE_BLOCK;  // beyond the whole blocks
    if (i > last) break;
    low = int_min(low, data[i * x.stride]);
    high = int_max(high, data[i * x.stride]);
  }
  return span_near(Span{(long long)low, (long long)high});
}
template <class C> FG_FN Span span_blocked(const C* data, const C* least, const C* most, Axis x, Axis y) {
  const Span bx = axis_box(x), by = axis_box(y);
  if ((bx.hi - bx.lo + 1) * (by.hi - by.lo + 1) <= TABLE_BLOCK) return span_scan(data, x, y);
  const long long rows = bx.hi / TABLE_BLOCK - bx.lo / TABLE_BLOCK + 1, columns = by.hi / TABLE_BLOCK - by.lo / TABLE_BLOCK + 1;
  if (rows * columns * TABLE_BLOCK > SPAN_LIMIT) return span_unknown();
  const Axis across{Span{by.lo / TABLE_BLOCK, by.hi / TABLE_BLOCK}, blocks(y.size), 1}, down{Span{bx.lo / TABLE_BLOCK, bx.hi / TABLE_BLOCK}, blocks(x.size), blocks(y.size)};
  return Span{span_scan(least, down, across).lo, span_scan(most, down, across).hi};
}
template <int BLOCKED> FG_FN long long table_size() { return 1; }
template <int BLOCKED, class... More> FG_FN long long table_size(Axis a, More... more) {
  return ((int)sizeof...(More) < BLOCKED ? blocks(a.size) : a.size) * table_size<BLOCKED>(more...);
}
template <int BLOCKED, class C, class... More> FG_FN Span span_table(const C* data, const C* least, const C* most, Axis first, More... more) {
  if constexpr ((int)sizeof...(More) < BLOCKED) {
    return span_blocked(data, least, most, first, more...);
  } else {
    const Span box = axis_box(first);
    if (box.lo != box.hi) return span_unknown();
    const long long step = box.lo * table_size<BLOCKED>(more...);
    return span_table<BLOCKED>(data + box.lo * first.stride, least + step, most + step, more...);
  }
}

// Explicit blocks along an axis: those whose entry in one of `lines` is not 0. In words of indices: the first >= begin, one past the last < end that lie in one.
// The entries of a row are looked at as they lie, on a device 32 at once: the lanes of a warp ask together, for the same. That takes no longer than reading a list
// of the blocks that are there would (a row of 128 blocks is 4 loads), and nobody has to make one beforehand.
#if FG_HOST
constexpr int LOOKERS = 1;
FG_FN int looker() { return 0; }
FG_FN int first_looker(bool x) { return x ? 0 : -1; }
#else
constexpr int LOOKERS = 32;
FG_FN int looker() { return threadIdx.x % 32; }
FG_FN int first_looker(bool x) { return __ffs(__ballot_sync(~0u, x)) - 1; }  // -1: nobody found anything
#endif
template <class C> FG_FN bool block_listed(const C* data, Axis lines, Axis along, int i) {
  if (i < 0 || i >= along.size) return false;
  const Span box = axis_box(lines);
  bool found = false;
#if !FG_HOST
#pragma unroll 1
#endif
  for (long long line = box.lo; line <= box.hi; ++line) found |= data[line * lines.stride + i * along.stride] != 0;
  return found;
}
template <class C> FG_FN int blocks_from(const C* data, Axis lines, Axis along, int size, int begin) {
  if (begin == NOWHERE) return NOWHERE;
#if !FG_HOST
#pragma unroll 1
#endif
  for (int i = clamp_index(begin / size, along.size); i < along.size; i += LOOKERS) {
    const int found = first_looker(block_listed(data, lines, along, i + looker()));
    if (found >= 0) return int_max(begin, (i + found) * size);
  }
  return NOWHERE;
}
template <class C> FG_FN int blocks_before(const C* data, Axis lines, Axis along, int size, int end) {
  if (end <= 0) return 0;
#if !FG_HOST
#pragma unroll 1
#endif
  for (int i = clamp_index((end - 1) / size, along.size); i >= 0; i -= LOOKERS) {
    const int found = first_looker(block_listed(data, lines, along, i - looker()));
    if (found >= 0) return i - found == along.size - 1 ? end : int_min(end, (i - found + 1) * size);
  }
  return 0;
}
FG_FN Truth truth_of(Span a) { return Truth{(a.lo > 0 || a.hi < 0) && !far(a), !(a.lo == 0 && a.hi == 0)}; }

}  // namespace fg
