// Kernels of the reduction of a Hermitian matrix to a tridiagonal one, on ranks that read each other's memory.
//
// For each column in turn, on each rank:
//
//   finish_and_begin   w of the column before, from all ranks' products; this column x, with all reflectors so far
//   multiply           the reflector v of x; this rank's part of A v, in pieces
//   collect            the sum of the pieces; v; then the last block tells the others, and waits for them
//
// All ranks compute x, v and w for themselves, from the same numbers in the same order: their bits must agree. NARROW
// columns are the most of a panel; A changes only after a panel.

#define NARROW 64
// A tile is ROWS rows of as many columns as a block comes to; a unit of work is ROWS x COLS elements.
#define ROWS 512
#define THREADS 128
#define PER_THREAD (ROWS / THREADS)
#define COLS 8
// Blocks of `multiply` on a multiprocessor: so many that the compiler keeps some numbers in local memory. One less, and
// parts on the diagonal, whose blocks end last, take several times as long (1 H200, float64, N = 16384: 0.48 in place of
// 0.28 ms).
#if COMPLEX && REAL_BYTES == 8
#define RESIDENT 4
#else
#define RESIDENT 5
#endif
#define MOST_TILES 1024
// Warps of the blocks of the other kernels, and how many columns of a panel each has.
#define WARPS 8
#define PER_WARP (NARROW / WARPS)
// The first bytes of the memory that others read: a number that ascends, and from 64 on two fingerprints.
#define HEADER 256
#define FINGERPRINTS 64

struct Params {
  T* a;  // this rank's block columns, and the distance of columns
  long long ld;
  long long n, rank, ranks, width, narrow;
  T* reflectors;  // V, W and V again, n x 3 narrow
  T* x;           // the column that is eliminated
  T* panel;       // the columns of the panel, as they are before it, n x narrow
  T* row_pieces;  // of A v: one tile of rows for each block and tile
  T* col_pieces;  // and tiles x this rank's columns
  long long columns;
  const int* units;  // for each panel: the number of the first unit of each tile, and of all units
  long long tiles;
  double* norms;  // pieces of the squared norm of x, of products of V and W with x
  T* dot_pieces;
  T* dots;
  double* scalars;  // beta, tau, the factor that makes x a reflector (two numbers each)
  double* d;
  double* e;
  T* factors;
  const long long* peers;  // the memory of each rank that others read
  long long part;          // bytes of one column's product in it, with the pieces of v^H A v
  int* status;             // an error, blocks that have ended
  volatile unsigned* host;  // the host says that the run is over; an error
  long long limit;          // nanoseconds that a rank waits for another one
  double tiny;              // squared norms up to this count as zero
};

enum { ABORTED = 1, LATE = 2, DIFFERENT = 3 };

__device__ void fail(const Params& p, unsigned code) {
  if (atomicCAS(p.status, 0, (int)code) == 0) {
    p.host[1] = code;
    __threadfence_system();
  }
}

__device__ __forceinline__ T* product_of(const Params& p, int rank, long long column) {
  return (T*)(p.peers[rank] + HEADER + (column & 1) * p.part);
}

// The pieces of v^H A v of a rank.
__device__ __forceinline__ double* quadratic_of(const Params& p, int rank, long long column) {
  return (double*)((char*)product_of(p, rank, column) + (p.n * sizeof(T) + 15) / 16 * 16);
}

// How many columns before a global one a rank has.
__device__ __forceinline__ long long columns_before(const Params& p, long long column) {
  long long round = p.width * p.ranks, rest = column % round - p.rank * p.width;
  return column / round * p.width + (rest < 0 ? 0 : rest > p.width ? p.width : rest);
}

// How many blocks of `multiply` have a unit of work.
__device__ __forceinline__ long long blocks_with_work(long long units, long long blocks) {
  return units < blocks ? (units ? units : 1) : blocks;
}

struct Reflector {
  double beta;
  T tau, scale;
};

// What the last block of `multiply` before has found out.
__device__ __forceinline__ Reflector found_reflector(const Params& p) {
  Reflector found;
  found.beta = p.scalars[0];
  found.tau = number(p.scalars[1], p.scalars[2]);
  found.scale = number(p.scalars[3], p.scalars[4]);
  return found;
}

// An element of v, which begins with 1 in row `first`. There is no branch: the loads of several elements go out together.
__device__ __forceinline__ T element(const Params& p, const Reflector& reflector, long long first, long long row) {
  long long safe = row < first ? first : row < p.n ? row : p.n - 1;
  T value = p.x[safe] * reflector.scale;
  value = row == safe ? value : number(0, 0);
  return row == first ? number(1, 0) : value;
}

// One block says that this rank's work is done up to `sequence`, and waits for the others. It ends in any case: if the
// host says so, or after the limit.
__device__ void meet(const Params& p, unsigned sequence, int thread) {
  if (thread == 0) {
    __threadfence_system();
    store_released((unsigned*)p.peers[p.rank], sequence);
  }
  // Nobody waits before the others can go on.
  __syncthreads();
  if (thread < p.ranks && thread != p.rank) {
    const unsigned* flag = (const unsigned*)p.peers[thread];
    long long begun = now();
    for (unsigned turn = 1; (int)(load_acquired(flag) - sequence) < 0; ++turn) {
      if (*(volatile int*)p.status) break;
      if (turn % 64) continue;
      if (p.host[0]) fail(p, ABORTED);
      if (now() - begun > p.limit) fail(p, LATE + 16 * thread);
    }
  }
}

extern "C" __global__ void meet_ranks(const Params* __restrict__ params, unsigned sequence) {
  Params p = *params;
  meet(p, sequence, threadIdx.x);
}

// The panel whose kernels follow: its first column, and the number of the word before those of its columns. It is told
// through memory, so that the launches of all panels are alike, and can be one graph.
extern "C" __global__ void next_panel(int* place, int start, int sequence) {
  place[0] = start;
  place[1] = sequence;
}

// W of column i - 1 of a panel (`finish`), and column i (`begin`). `pieces`: of v^H A v, on each rank.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    finish_and_begin(const Params* __restrict__ params, const int* __restrict__ place, int i, int finish, int begin,
                     int pieces) {
  Params p = *params;
  int start = place[0];
  int lane = threadIdx.x, warp = threadIdx.y, thread = warp * 32 + lane, last = i - 1;
  long long column = (long long)start + i;
  T *v = p.reflectors, *w = v + p.narrow * p.n;
  // For columns k before: V_k^H v, W_k^H v; and this column's row of V and W, conjugated.
  __shared__ T of_v[NARROW], of_w[NARROW], row_v[NARROW], row_w[NARROW];
  __shared__ T sums[3][WARPS][32];
  __shared__ double quadratic[WARPS];
  __shared__ T corrections[WARPS];
  T tau = number(0, 0), first_w = number(0, 0);
  double alpha = 0;
  if (finish) {
    double c = 0;
    T correction = number(0, 0);
    for (int rank = 0; rank < p.ranks; ++rank) {
      const double* piece = quadratic_of(p, rank, column - 1);
      for (int at = thread; at < pieces; at += 32 * WARPS) c += *(const volatile double*)(piece + at);
    }
    if (thread < last) {
      T with_v = p.dots[2 * thread], with_w = p.dots[2 * thread + 1];
      T of_row_v = v[column + thread * p.n], of_row_w = w[column + thread * p.n];
      of_v[thread] = with_v;
      of_w[thread] = with_w;
      row_v[thread] = conjugate(of_row_v);
      row_w[thread] = conjugate(of_row_w);
      c -= 2 * (double)real_of(conjugate(with_v) * with_w);
      correction = of_row_v * with_w + of_row_w * with_v;
    }
    c = over_lanes(c);
    correction = over_lanes(correction);
    if (lane == 0) {
      quadratic[warp] = c;
      corrections[warp] = correction;
    }
    __syncthreads();
    c = 0;
    correction = number(0, 0);
    for (int at = 0; at < WARPS; ++at) {
      c += quadratic[at];
      correction = correction + corrections[at];
    }
    Reflector reflector = found_reflector(p);
    tau = reflector.tau;
    alpha = -0.5 * square_of(tau) * c;
    // v is 1 in this row.
    T y = number(0, 0);
    for (int rank = 0; rank < p.ranks; ++rank) y = y + load_fresh(product_of(p, rank, column - 1) + column);
    first_w = tau * (y - correction) + number(alpha, 0);
    if (thread < p.ranks && blockIdx.x == 0) {
      const double* theirs = (const double*)(p.peers[thread] + FINGERPRINTS) + ((column - 1) & 1);
      double beta = *(const volatile double*)theirs;
      if (beta != reflector.beta && (beta == beta || reflector.beta == reflector.beta)) fail(p, DIFFERENT);
    }
    __syncthreads();
  }
  T with_v[PER_WARP], with_w[PER_WARP];
#pragma unroll
  for (int u = 0; u < PER_WARP; ++u) with_v[u] = with_w[u] = number(0, 0);
  double norm = 0;
  for (long long group = column / 32 * 32 + 32 * (long long)blockIdx.x; group < p.n; group += 32 * (long long)gridDim.x) {
    long long row = group + lane;
    bool inside = row >= column && row < p.n;
    T below = number(0, 0), beside = number(0, 0), here_v[PER_WARP], here_w[PER_WARP];
    // All loads go out before the first one is used, without branches: those that do not count are of other elements.
    long long safe = inside ? row : column;
#pragma unroll
    for (int u = 0; u < PER_WARP; ++u) {
      long long from = warp + WARPS * u < last ? warp + WARPS * u : 0;
      here_v[u] = v[safe + from * p.n];
      here_w[u] = w[safe + from * p.n];
    }
    T latest = number(0, 0);
    if (warp == 0 && inside) {
      if (finish) {
        latest = v[row + last * p.n];
        for (int rank = 0; rank < p.ranks; ++rank) below = below - load_fresh(product_of(p, rank, column - 1) + row);
        beside = plus_product(beside, latest, conjugate(first_w));
      }
      if (begin) beside = beside - p.panel[row + i * p.n];
    }
#pragma unroll
    for (int u = 0; u < PER_WARP; ++u) {
      int k = warp + WARPS * u;
      bool counts = inside && k < last;
      here_v[u] = counts ? here_v[u] : number(0, 0);
      here_w[u] = counts ? here_w[u] : number(0, 0);
      if (k < last) {
        below = plus_product(plus_product(below, here_v[u], of_w[k]), here_w[u], of_v[k]);
        beside = plus_product(plus_product(beside, here_v[u], row_w[k]), here_w[u], row_v[k]);
      }
    }
    sums[0][warp][lane] = below;
    sums[1][warp][lane] = beside;
    if (warp == 0) sums[2][0][lane] = latest;
    __syncthreads();
    below = beside = number(0, 0);
    for (int at = 0; at < WARPS; ++at) {
      below = below + sums[0][at][lane];
      beside = beside + sums[1][at][lane];
    }
    latest = sums[2][0][lane];
    __syncthreads();
    T new_w = number(0, 0), x = number(0, 0);
    if (inside) {
      if (finish) new_w = latest * number(alpha, 0) - tau * below;
      // In this column's row v of the column before is 1.
      if (begin) x = number(0, 0) - beside - new_w;
      if (warp == 0) {
        if (finish) w[row + last * p.n] = new_w;
        if (begin) p.x[row] = x;
        if (begin && row == column) p.d[column] = real_of(x);
        if (begin && row > column + 1) norm += square_of(x);
      }
      if (begin && row > column) {
#pragma unroll
        for (int u = 0; u < PER_WARP; ++u) {
          bool is_last = warp + WARPS * u == last;
          with_v[u] = plus_adjoint_product(with_v[u], is_last ? latest : here_v[u], x);
          with_w[u] = plus_adjoint_product(with_w[u], is_last ? new_w : here_w[u], x);
        }
      }
    }
  }
  if (!begin) return;
#pragma unroll
  for (int u = 0; u < PER_WARP; ++u) {
    int k = warp + WARPS * u;
    T sum_v = over_lanes(with_v[u]), sum_w = over_lanes(with_w[u]);
    if (lane == 0 && k < i) {
      p.dot_pieces[(blockIdx.x * NARROW + k) * 2] = sum_v;
      p.dot_pieces[(blockIdx.x * NARROW + k) * 2 + 1] = sum_w;
    }
  }
  norm = over_lanes(norm);
  if (thread == 0) p.norms[blockIdx.x] = norm;
}

// The reflector of column i of a panel, and this rank's part of A v in pieces. `pieces`: of the norm of x.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    multiply(const Params* __restrict__ params, const int* __restrict__ place, int i, int pieces) {
  Params p = *params;
  int start = place[0];
  int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  long long column = (long long)start + i, first = column + 1;
  __shared__ double norms[THREADS / 32];
  __shared__ int units[MOST_TILES + 1];
  __shared__ T out[2][THREADS / 32][COLS];
  const int* table = p.units + start / p.narrow * (p.tiles + 1);
  for (int at = thread; at <= p.tiles; at += THREADS) units[at] = table[at];
  double norm = 0;
  for (int at = thread; at < pieces; at += THREADS) norm += p.norms[at];
  norm = over_lanes(norm);
  if (lane == 0) norms[warp] = norm;
  __syncthreads();
  norm = 0;
  for (int at = 0; at < THREADS / 32; ++at) norm += norms[at];
  T head = p.x[first];
  double real = real_of(head), imaginary = imaginary_of(head);
  norm += imaginary * imaginary;
  Reflector reflector;
  reflector.beta = real;
  reflector.tau = reflector.scale = number(0, 0);
  if (!(norm <= p.tiny)) {
    double beta = real > 0 ? -sqrt(real * real + norm) : sqrt(real * real + norm);
    double size = (real - beta) * (real - beta) + imaginary * imaginary;
    reflector.beta = beta;
    reflector.tau = number((beta - real) / beta, -imaginary / beta);
    reflector.scale = number((real - beta) / size, -imaginary / size);
  }
  if (blockIdx.x == 0 && thread == 0) {
    p.scalars[0] = reflector.beta;
    p.scalars[1] = real_of(reflector.tau);
    p.scalars[2] = imaginary_of(reflector.tau);
    p.scalars[3] = real_of(reflector.scale);
    p.scalars[4] = imaginary_of(reflector.scale);
    p.e[column] = reflector.beta;
    p.factors[column] = reflector.tau;
  }
  long long total = units[p.tiles], blocks = blocks_with_work(total, gridDim.x);
  if (blockIdx.x >= blocks) return;
  long long unit = total * blockIdx.x / blocks, end = total * (blockIdx.x + 1) / blocks;
  long long before = columns_before(p, start);
  // The tile of the first unit: the last one that begins at or before it.
  int tile = 0;
  for (int high = (int)p.tiles; high - tile > 1;) {
    int middle = (tile + high) / 2;
    if (units[middle] <= unit)
      tile = middle;
    else
      high = middle;
  }
  int parity = 0;
  for (; unit < end; ++tile) {
    long long stop = units[tile + 1] < end ? units[tile + 1] : end, top = (long long)tile * ROWS + thread;
    T in_rows[PER_THREAD], row_sums[PER_THREAD];
#pragma unroll
    for (int m = 0; m < PER_THREAD; ++m) {
      in_rows[m] = element(p, reflector, first, top + m * THREADS);
      row_sums[m] = number(0, 0);
    }
    for (; unit < stop; ++unit) {
      // A unit is inside of one block column.
      long long local = before + (unit - units[tile]) * COLS;
      long long global = (local / p.width * p.ranks + p.rank) * p.width + local % p.width;
      const T* source = p.a + local * p.ld + top;
      T in_cols[COLS], col_sums[COLS];
#pragma unroll
      for (int k = 0; k < COLS; ++k) {
        in_cols[k] = element(p, reflector, first, global + k);
        col_sums[k] = number(0, 0);
      }
      if (global + COLS <= (long long)tile * ROWS && ((long long)tile + 1) * ROWS <= p.n) {
#pragma unroll
        for (int k = 0; k < COLS; ++k) {
#pragma unroll
          for (int m = 0; m < PER_THREAD; ++m) {
            T one = load_once(source + k * p.ld + m * THREADS);
            row_sums[m] = plus_product(row_sums[m], one, in_cols[k]);
            col_sums[k] = plus_adjoint_product(col_sums[k], one, in_rows[m]);
          }
        }
      } else {
#pragma unroll
        for (int m = 0; m < PER_THREAD; ++m) {
          long long begin = (long long)tile * ROWS + m * THREADS, row = begin + thread;
          // Of a part that is on the diagonal, or at an end of the matrix, all is loaded; what is above the diagonal may
          // be anything, and does not count; on it only the real part does.
          if (begin + THREADS > global && begin < p.n) {
            const T* line = p.a + local * p.ld + (row < p.n ? row : p.n - 1);
            T ones[COLS];
#pragma unroll
            for (int k = 0; k < COLS; ++k) ones[k] = load_once(line + (global + k < p.n ? k : 0) * p.ld);
#pragma unroll
            for (int k = 0; k < COLS; ++k) {
              bool counts = row < p.n && row >= global + k, diagonal = row == global + k;
              T one = counts ? ones[k] : number(0, 0);
              one = diagonal ? number(real_of(one), 0) : one;
              row_sums[m] = plus_product(row_sums[m], one, in_cols[k]);
              one = diagonal ? number(0, 0) : one;
              col_sums[k] = plus_adjoint_product(col_sums[k], one, in_rows[m]);
            }
          }
        }
      }
      // Each step halves the columns that a lane has, and doubles the lanes that are in its sums.
#pragma unroll
      for (int size = COLS / 2, mask = 16; size; size /= 2, mask /= 2) {
#pragma unroll
        for (int k = 0; k < size; ++k) {
          bool upper = lane & mask;
          T given = upper ? col_sums[k] : col_sums[k + size];
          col_sums[k] = (upper ? col_sums[k + size] : col_sums[k]) + exchanged(given, mask);
        }
      }
      T sum = col_sums[0];
      sum = sum + exchanged(sum, 2);
      sum = sum + exchanged(sum, 1);
      if (lane % 4 == 0) out[parity][warp][lane / 4] = sum;
      __syncthreads();
      if (thread < COLS && global + thread < p.n) {
        sum = number(0, 0);
        for (int at = 0; at < THREADS / 32; ++at) sum = sum + out[parity][at][thread];
        p.col_pieces[tile * p.columns + local + thread] = sum;
      }
      parity ^= 1;
    }
#pragma unroll
    for (int m = 0; m < PER_THREAD; ++m)
      p.row_pieces[((long long)blockIdx.x + tile) * ROWS + thread + m * THREADS] = row_sums[m];
  }
}

// The sums of the pieces, in blocks of rows; v; products of V and W with v. `blocks`: those of `multiply`; `pieces`: of
// products of V and W with x; `rows`: the first blocks are for rows, the others for products.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    collect(const Params* __restrict__ params, const int* __restrict__ place, int i, int blocks, int pieces, int rows) {
  Params p = *params;
  int start = place[0];
  int lane = threadIdx.x, warp = threadIdx.y, thread = warp * 32 + lane;
  long long column = (long long)start + i, first = column + 1;
  T *v = p.reflectors, *w = v + p.narrow * p.n;
  Reflector reflector = found_reflector(p);
  __shared__ int units[MOST_TILES + 1];
  __shared__ T sums[WARPS][32];
  __shared__ bool is_last;
  if ((int)blockIdx.x < rows) {
    const int* table = p.units + start / p.narrow * (p.tiles + 1);
    for (int at = thread; at <= p.tiles; at += 32 * WARPS) units[at] = table[at];
    __syncthreads();
    long long total = units[p.tiles], working = blocks_with_work(total, blocks);
    T* product = product_of(p, p.rank, column);
    double quadratic = 0;
    for (long long group = start / 32 * 32 + 32 * (long long)blockIdx.x; group < p.n; group += 32 * (long long)rows) {
      long long row = group + lane;
      T sum = number(0, 0);
      if (row >= first && row < p.n) {
        int tile = row / ROWS;
        long long low = units[tile], high = units[tile + 1];
        if (high > low) {
          // The blocks whose units include the first and the last one of the tile.
          long long from = ((low + 1) * working - 1) / total, to = (high * working - 1) / total;
#pragma unroll 4
          for (long long at = from + warp; at <= to; at += WARPS)
            sum = sum + p.row_pieces[(at + tile) * ROWS + row % ROWS];
        }
        long long block = row / p.width;
        if (block % p.ranks == p.rank) {
          long long local = block / p.ranks * p.width + row % p.width;
#pragma unroll 4
          for (long long at = tile + warp; at < p.tiles; at += WARPS) sum = sum + p.col_pieces[at * p.columns + local];
        }
      }
      sums[warp][lane] = sum;
      __syncthreads();
      if (warp == 0 && row >= start && row < p.n) {
        T value = element(p, reflector, first, row);
        v[row + i * p.n] = value;
        v[row + (2 * p.narrow + i) * p.n] = value;
        if (row >= first) {
          sum = number(0, 0);
          for (int at = 0; at < WARPS; ++at) sum = sum + sums[at][lane];
          product[row] = sum;
          quadratic += (double)real_of(conjugate(value) * sum);
        }
      }
      __syncthreads();
    }
    quadratic = over_lanes(quadratic);
    if (thread == 0) quadratic_of(p, p.rank, column)[blockIdx.x] = quadratic;
    if (thread == 0 && blockIdx.x == 0)
      ((double*)(p.peers[p.rank] + FINGERPRINTS))[column & 1] = reflector.beta;
  } else {
    // 16 products in a block, 16 threads for each.
    int number_of = (blockIdx.x - rows) * 16 + thread % 16, slice = thread / 16;
    T sum = number(0, 0);
    if (number_of < 2 * i)
#pragma unroll 4
      for (int at = slice; at < pieces; at += 16) sum = sum + p.dot_pieces[(long long)at * NARROW * 2 + number_of];
    T* shared = &sums[0][0];
    shared[slice * 16 + thread % 16] = sum;
    __syncthreads();
    if (thread < 16 && number_of < 2 * i) {
      sum = number(0, 0);
      for (int at = 0; at < 16; ++at) sum = sum + shared[at * 16 + thread];
      // v is (x - beta e) times its scale.
      T corner = (number_of % 2 ? w : v)[first + number_of / 2 * p.n];
      p.dots[number_of] = reflector.scale * (sum - number(reflector.beta, 0) * conjugate(corner));
    }
  }
  if (p.ranks == 1) return;
  __threadfence_system();
  __syncthreads();
  if (thread == 0) {
    is_last = atomicAdd(p.status + 1, 1) == (int)gridDim.x - 1;
    if (is_last) p.status[1] = 0;
  }
  __syncthreads();
  if (is_last) meet(p, (unsigned)(place[1] + i + 1), thread);
}

// Copies columns of a matrix of double precision, whose numbers are given, to another matrix.
extern "C" __global__ void take_columns(const double* __restrict__ source, long long ld_source,
                                        const long long* __restrict__ numbers, T* __restrict__ target,
                                        long long ld_target, long long rows, long long blocks) {
  long long at = blockIdx.x / blocks, row = blockIdx.x % blocks * blockDim.x + threadIdx.x;
  if (row < rows) target[row + at * ld_target] = number(source[row + numbers[at] * ld_source], 0);
}
