// Parts of a matrix on their way to factors of few bits, and their sizes: `numbers.cu` has the numbers of the matrix.

#if COMPLEX
__device__ __forceinline__ R size_of(T a) { return fabs(a.x) + fabs(a.y); }
typedef float2 Few;
__device__ __forceinline__ Few few(T a, R scale, R sign) {
  Few found;
  found.x = (float)(a.x * scale);
  found.y = (float)(a.y * scale * sign);
  return found;
}
#else
__device__ __forceinline__ R size_of(T a) { return fabs(a); }
typedef float Few;
__device__ __forceinline__ Few few(T a, R scale, R) { return (float)(a * scale); }
#endif

// Writes a part to a column-major matrix, its rows and columns multiplied by numbers where these are not null. Distances
// are in elements. 32 x 8 threads turn a block of 32 x 32 elements around, whatever the order of the source is.
extern "C" __global__ void gather_scaled(long long source, long long down, long long across, long long by_rows,
                                         long long by_columns, long long rows, long long columns, long long target,
                                         long long distance, int conjugated) {
  __shared__ T tile[32][33];
  const long long high = (rows + 31) >> 5;
  const long long i0 = (blockIdx.x % high) << 5, j0 = (blockIdx.x / high) << 5;
  const T* from = (const T*)source;
  for (int u = threadIdx.y; u < 32; u += 8) {
    const int di = across == 1 ? u : threadIdx.x, dj = across == 1 ? threadIdx.x : u;
    const long long i = i0 + di, j = j0 + dj;
    if (i < rows && j < columns) tile[di][dj] = from[i * down + j * across];
  }
  __syncthreads();
  for (int u = threadIdx.y; u < 32; u += 8) {
    const long long i = i0 + threadIdx.x, j = j0 + u;
    if (i >= rows || j >= columns) continue;
    const R scale = (by_rows ? ((const R*)by_rows)[i] : (R)1) * (by_columns ? ((const R*)by_columns)[j] : (R)1);
    ((Few*)target)[i + j * distance] = few(tile[threadIdx.x][u], scale, conjugated ? (R)-1 : (R)1);
  }
}

// Adds the sums of the sizes of rows, 32 rows a block of 32 x 8 threads. Always in the same order.
extern "C" __global__ void add_sizes(long long source, long long down, long long across, long long rows,
                                     long long columns, long long sums) {
  __shared__ R part[32][33];
  const long long i0 = (long long)blockIdx.x << 5;
  const T* from = (const T*)source;
  const bool by_rows = across == 1;
  // Of rows that are dense each has a warp; otherwise each thread has a row.
  for (int u = threadIdx.y; u < (by_rows ? 32 : 8); u += 8) {
    const int di = by_rows ? u : threadIdx.x, at = by_rows ? threadIdx.x : u, step = by_rows ? 32 : 8;
    const long long i = i0 + di;
    R sum = 0;
    if (i < rows) {
#pragma unroll 8
      for (long long j = at; j < columns; j += step) sum += size_of(from[i * down + j * across]);
    }
    part[di][at] = sum;
  }
  __syncthreads();
  if (threadIdx.y == 0 && i0 + threadIdx.x < rows) {
    R sum = 0;
    for (int u = 0; u < (by_rows ? 32 : 8); ++u) sum += part[threadIdx.x][u];
    ((R*)sums)[i0 + threadIdx.x] += sum;
  }
}
