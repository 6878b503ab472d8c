// Tiles of 16-bit elements in shared memory: their swizzle, the addresses that ldmatrix wants, and the ways in and out.
#pragma once
#include "fg/sm80/ptx.cuh"

namespace fg {

template <int BYTES> struct WordOf;
template <> struct WordOf<1> { using type = unsigned char; };
template <> struct WordOf<2> { using type = unsigned short; };
template <> struct WordOf<4> { using type = unsigned; };
template <> struct WordOf<8> { using type = unsigned long long; };
template <int BYTES> using Word = typename WordOf<BYTES>::type;  // an integer of as many bytes

struct alignas(16) Chunk { unsigned words[4]; };  // 8 elements of 16 bits

// ROWS x COLUMNS, row by row without gaps. A row is cut into chunks of 16 bytes (8 elements); chunk c of row r lies at place c ^ swizzle(r), so that the 8 rows of
// an 8x8 matrix, one chunk each, fall into 8 different groups of four banks, for any even number of chunks.
template <int ROWS_, int COLUMNS_> struct alignas(128) Tile {
  static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, CHUNKS = COLUMNS / 8, PITCH = COLUMNS * 2;  // PITCH in bytes
  static constexpr int SPAN = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2;                         // chunks that are permuted among themselves
  static_assert(COLUMNS % 16 == 0, "pad head dims to a multiple of 16");
  unsigned short bits[ROWS * COLUMNS];

  static FG_FN int swizzle(int row) { return row / (8 / SPAN) % SPAN; }
  static FG_FN int offset(int row, int chunk) { return row * PITCH + (chunk ^ swizzle(row)) * 16; }  // in bytes
  FG_FN char* at(int row, int chunk) { return reinterpret_cast<char*>(bits) + offset(row, chunk); }
};

// One chunk from memory that is aligned to single elements only: `count` of its 8 elements, then zeros.
template <class T> FG_FN void load_chunk(char* target, const T* source, int count) {
  if (reinterpret_cast<unsigned long long>(source) % 4 == 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int bytes = count - 2 * i <= 0 ? 0 : count - 2 * i == 1 ? 2 : 4;
      copy_async_4(shared_address(target) + 4 * i, source + 2 * i, bytes);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned low = 2 * i < count ? source[2 * i].bits : 0, high = 2 * i + 1 < count ? source[2 * i + 1].bits : 0;
      reinterpret_cast<unsigned*>(target)[i] = low | high << 16;
    }
  }
}

// One chunk of a row to registers: what lies beyond the row's VALID_COLUMNS becomes zero.
template <int VALID_COLUMNS, bool ALIGNED, class T> FG_FN void read_chunk(unsigned (&x)[4], const T* row, int chunk) {
  if (ALIGNED && (VALID_COLUMNS % 8 == 0 || chunk * 8 + 8 <= VALID_COLUMNS)) {
    if (VALID_COLUMNS % 8 == 0 && chunk * 8 >= VALID_COLUMNS) {
      x[0] = x[1] = x[2] = x[3] = 0;
      return;
    }
    const Chunk value = *reinterpret_cast<const Chunk*>(row + chunk * 8);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = value.words[i];
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int column = chunk * 8 + 2 * i;
    const unsigned low = column < VALID_COLUMNS ? row[column].bits : 0, high = column + 1 < VALID_COLUMNS ? row[column + 1].bits : 0;
    x[i] = low | high << 16;
  }
}
template <class T> FG_FN float element(const unsigned (&x)[4], int e) { return to_real(T{(unsigned short)(x[e / 2] >> e % 2 * 16)}); }

// Starts the copy of rows first_row, first_row + 1 ... of a row-major matrix (`rows` rows of VALID_COLUMNS, `stride` elements from one to the next) into a tile. What
// lies beyond the matrix is never read and becomes zero. All THREADS threads take part. ALIGNED: every row starts on 16 bytes.
template <int THREADS, int VALID_COLUMNS, bool ALIGNED, class TILE, class T>
FG_FN void load_tile(TILE& tile, const T* matrix, long long stride, int first_row, int rows) {
  constexpr int ACROSS = TILE::SPAN, DOWN = THREADS / ACROSS;  // neighbouring threads take the chunks of a span
  static_assert(DOWN % 8 == 0, "the swizzle repeats every 8 rows");
  const int chunk = threadIdx.x % ACROSS, first = threadIdx.x / ACROSS;
  char* const target = tile.at(first, chunk);
  const T* line = matrix + multiply_add(first_row + first, stride, chunk * 8);
#pragma unroll
  for (int i = 0; i < (TILE::ROWS + DOWN - 1) / DOWN; ++i) {
    const int row = first + i * DOWN;
    if (TILE::ROWS % DOWN == 0 || row < TILE::ROWS) {
#pragma unroll
      for (int across = 0; across < TILE::CHUNKS; across += ACROSS) {
        const int left = VALID_COLUMNS - (across + chunk) * 8;
        const int valid = VALID_COLUMNS >= (across + ACROSS) * 8 || left > 8 ? 8 : left < 0 ? 0 : left;
        const int count = first_row + row < rows ? valid : 0;
        char* const to = target + i * DOWN * TILE::PITCH + across * 16;
        if constexpr (ALIGNED) copy_async_16(shared_address(to), line + across * 8, count * 2);
        else load_chunk(to, line + across * 8, count);
      }
    }
    line += DOWN * stride;
  }
}

// Writes the first `rows` rows and VALID_COLUMNS columns of a tile to a row-major matrix. All THREADS threads take part.
template <int THREADS, int VALID_COLUMNS, bool ALIGNED, class TILE, class T>
FG_FN void store_tile(T* target, long long stride, int rows, TILE& tile) {
  constexpr int ACROSS = TILE::SPAN, DOWN = THREADS / ACROSS;
  const int chunk = threadIdx.x % ACROSS, first = threadIdx.x / ACROSS;
#pragma unroll
  for (int i = 0; i < (TILE::ROWS + DOWN - 1) / DOWN; ++i) {
    const int row = first + i * DOWN;
    if (row < TILE::ROWS && row < rows) {
#pragma unroll
      for (int across = 0; across < TILE::CHUNKS; across += ACROSS) {
        const int column = (across + chunk) * 8;
        const Chunk value = *reinterpret_cast<const Chunk*>(tile.at(row, across + chunk));
        T* const to = target + row * stride + column;
        if (ALIGNED && (VALID_COLUMNS >= (across + ACROSS) * 8 || column + 8 <= VALID_COLUMNS)) {
          *reinterpret_cast<Chunk*>(to) = value;
        } else {
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            if (column + e < VALID_COLUMNS) to[e].bits = (unsigned short)(value.words[e / 2] >> e % 2 * 16);
          }
        }
      }
    }
  }
}

}  // namespace fg
