// Parts of a matrix on their way to factors of few bits: `numbers.cu` has the numbers of the matrix.

#if COMPLEX
typedef float2 Few;
__device__ __forceinline__ Few few(T a, R scale, R sign) {
  Few found;
  found.x = (float)(a.x * scale);
  found.y = (float)(a.y * scale * sign);
  return found;
}
#else
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
