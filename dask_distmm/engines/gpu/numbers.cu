// Real and complex numbers of one precision. REAL and COMPLEX are defined before.

typedef REAL R;

#if COMPLEX
struct __align__(2 * sizeof(REAL)) T {
  R x, y;
};
__device__ __forceinline__ T number(double x, double y) {
  T found;
  found.x = (R)x;
  found.y = (R)y;
  return found;
}
__device__ __forceinline__ T operator+(T a, T b) { return number(a.x + b.x, a.y + b.y); }
__device__ __forceinline__ T operator-(T a, T b) { return number(a.x - b.x, a.y - b.y); }
__device__ __forceinline__ T operator*(T a, T b) { return number(a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x); }
__device__ __forceinline__ T conjugate(T a) { return number(a.x, -a.y); }
__device__ __forceinline__ R real_of(T a) { return a.x; }
__device__ __forceinline__ R imaginary_of(T a) { return a.y; }
// sum + a b, and sum + conj(a) b
__device__ __forceinline__ T plus_product(T sum, T a, T b) {
  sum.x = fma(a.x, b.x, fma(-a.y, b.y, sum.x));
  sum.y = fma(a.x, b.y, fma(a.y, b.x, sum.y));
  return sum;
}
__device__ __forceinline__ T plus_adjoint_product(T sum, T a, T b) {
  sum.x = fma(a.x, b.x, fma(a.y, b.y, sum.x));
  sum.y = fma(a.x, b.y, fma(-a.y, b.x, sum.y));
  return sum;
}
__device__ __forceinline__ T exchanged(T a, int mask) {
  T found;
  found.x = __shfl_xor_sync(0xffffffffu, a.x, mask);
  found.y = __shfl_xor_sync(0xffffffffu, a.y, mask);
  return found;
}
__device__ __forceinline__ T load_once(const T* p) {
#if REAL_BYTES == 8
  double2 found = __ldcs((const double2*)p);
#else
  float2 found = __ldcs((const float2*)p);
#endif
  T made;
  made.x = found.x;
  made.y = found.y;
  return made;
}
__device__ __forceinline__ T load_fresh(const T* p) {
  const volatile R* q = (const volatile R*)p;
  T made;
  made.x = q[0];
  made.y = q[1];
  return made;
}
#else
typedef R T;
__device__ __forceinline__ T number(double x, double) { return (R)x; }
__device__ __forceinline__ T conjugate(T a) { return a; }
__device__ __forceinline__ R real_of(T a) { return a; }
__device__ __forceinline__ R imaginary_of(T) { return 0; }
__device__ __forceinline__ T plus_product(T sum, T a, T b) { return fma(a, b, sum); }
__device__ __forceinline__ T plus_adjoint_product(T sum, T a, T b) { return fma(a, b, sum); }
__device__ __forceinline__ T exchanged(T a, int mask) { return __shfl_xor_sync(0xffffffffu, a, mask); }
__device__ __forceinline__ T load_once(const T* p) { return __ldcs(p); }
__device__ __forceinline__ T load_fresh(const T* p) { return *(const volatile T*)p; }
#endif

__device__ __forceinline__ double square_of(T a) {
  double x = real_of(a), y = imaginary_of(a);
  return x * x + y * y;
}

// The sum over the lanes of a warp, the same on all of them.
__device__ __forceinline__ T over_lanes(T a) {
  for (int mask = 16; mask; mask >>= 1) a = a + exchanged(a, mask);
  return a;
}
#if COMPLEX || REAL_BYTES != 8
__device__ __forceinline__ double over_lanes(double a) {
  for (int mask = 16; mask; mask >>= 1) a += __shfl_xor_sync(0xffffffffu, a, mask);
  return a;
}
#endif
