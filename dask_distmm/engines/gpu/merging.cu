// Kernels of divide and conquer in double precision: the same as engines/tridiagonal.py has,
// which says what is computed.

#define EPS 1.1102230246251565e-16
#define MOST_STEPS 100
#define THREADS 256

__device__ __forceinline__ double over_lanes(double a) {
  for (int mask = 16; mask; mask >>= 1) a += __shfl_xor_sync(0xffffffffu, a, mask);
  return a;
}

struct Sums {
  double below, above, below_slope, above_slope;
};

// The sums over the poles up to number `last_below` and above it, at a distance from a pole; by all lanes of a warp.
__device__ Sums secular_sums(const double* poles, const double* weights, int count, int last_below, double origin,
                             double shift, int lane) {
  Sums sums = {0, 0, 0, 0};
  for (int i = lane; i < count; i += 32) {
    double distance = (poles[i] - origin) - shift, term = weights[i] * weights[i] / distance, slope = term / distance;
    if (i <= last_below) {
      sums.below += term;
      sums.below_slope += slope;
    } else {
      sums.above += term;
      sums.above_slope += slope;
    }
  }
  sums.below = over_lanes(sums.below);
  sums.above = over_lanes(sums.above);
  sums.below_slope = over_lanes(sums.below_slope);
  sums.above_slope = over_lanes(sums.above_slope);
  return sums;
}

// A root of c x^2 - a x + b: the one that tends to b / a as c vanishes, or the larger one.
__device__ double quadratic_root(double a, double b, double c, bool larger) {
  double root = sqrt(fmax(a * a - 4 * b * c, 0.0));
  if (larger) return a >= 0 ? (a + root) / (2 * c) : 2 * b / (a - root);
  return a > 0 ? 2 * b / (a + root) : (a - root) / (2 * c);
}

// A shift, or if it is outside of its bracket the middle of that.
__device__ double inside(double shift, double low, double high) {
  if (shift > low && shift < high) return shift;
  if (low == 0 || high == 0) return (low == 0 ? high : low) / 32;
  return copysign(sqrt(low * high), high);
}

// One root of the secular equation for each warp.
extern "C" __global__ void secular_roots(const double* __restrict__ poles, const double* __restrict__ weights, int count,
                                         double inverse, double highest, long long* __restrict__ origins,
                                         double* __restrict__ shifts) {
  int lane = threadIdx.x % 32, root = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  if (root >= count) return;
  if (count == 1) {
    if (lane == 0) {
      origins[0] = 0;
      shifts[0] = weights[0] * weights[0] / inverse;
    }
    return;
  }
  bool last = root == count - 1;
  int below = last ? count - 2 : root;
  double gap = poles[below + 1] - poles[below], p = weights[below] * weights[below];
  double q = weights[below + 1] * weights[below + 1];
  Sums sums = secular_sums(poles, weights, count, below, poles[below], gap / 2, lane);
  double middle = inverse + sums.below + sums.above;
  bool left = middle >= 0 && !last;
  int origin = left ? below : below + 1;
  double rest = middle + 2 * (p - q) / gap, near = left ? p : q, far = left ? q : p;
  if (!left) rest = -rest;
  double guess = quadratic_root(rest * gap + near + far, near * gap, rest, false);
  guess = last ? q / inverse : left ? guess : -guess;
  double low = left || last ? 0 : -gap / 2, high = last ? highest : left ? gap / 2 : 0;
  double shift = inside(guess, low, high);
  for (int step = 0; step < MOST_STEPS; ++step) {
    sums = secular_sums(poles, weights, count, below, poles[origin], shift, lane);
    double f = inverse + sums.below + sums.above, slope = sums.below_slope + sums.above_slope;
    if (f < 0)
      low = shift;
    else
      high = shift;
    double noise = EPS * (8 * (fabs(sums.below) + fabs(sums.above)) + inverse + fabs(shift) * slope);
    double one = (poles[below] - poles[origin]) - shift, other = (poles[below + 1] - poles[origin]) - shift;
    double a = (one + other) * f - one * other * slope, b = one * other * f;
    double move = quadratic_root(a, b, f - one * sums.below_slope - other * sums.above_slope, last);
    // The function ascends.
    if (!(f * move < 0)) move = -f / slope;
    double moved = step > 8 && step % 2 ? inside(low, low, high) : inside(shift + move, low, high);
    if (fabs(f) <= noise || fabs(moved - shift) <= EPS * fabs(shift)) break;
    shift = moved;
  }
  if (lane == 0) {
    origins[root] = origin;
    shifts[root] = shift;
  }
}

// The weights for which the roots are exact, one for each warp.
extern "C" __global__ void fitted_weights(const double* __restrict__ poles, const double* __restrict__ weights, int count,
                                          const long long* __restrict__ origins, const double* __restrict__ shifts,
                                          double* __restrict__ fitted) {
  int lane = threadIdx.x % 32, row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  if (row >= count) return;
  double pole = poles[row], product = 1;
  for (int j = lane; j < count; j += 32) {
    double far = (poles[origins[j]] - pole) + shifts[j];
    product *= j == row ? far : far / (poles[j] - pole);
  }
  for (int mask = 16; mask; mask >>= 1) product *= __shfl_xor_sync(0xffffffffu, product, mask);
  if (lane == 0) fitted[row] = copysign(sqrt(fabs(product)), weights[row]);
}

// Eigenvectors from number `first` on, one for each block, with rows in an order, of length 1.
extern "C" __global__ void secular_vectors(const double* __restrict__ poles, const double* __restrict__ fitted, int count,
                                           const long long* __restrict__ origins, const double* __restrict__ shifts,
                                           const long long* __restrict__ rows, int first, double* __restrict__ out,
                                           long long ld) {
  int root = first + blockIdx.x, thread = threadIdx.x;
  double origin = poles[origins[root]], shift = shifts[root], sum = 0;
  __shared__ double sums[THREADS / 32];
  for (int at = thread; at < count; at += THREADS) {
    double one = fitted[at] / ((poles[at] - origin) - shift);
    sum += one * one;
  }
  sum = over_lanes(sum);
  if (thread % 32 == 0) sums[thread / 32] = sum;
  __syncthreads();
  sum = 0;
  for (int at = 0; at < THREADS / 32; ++at) sum += sums[at];
  double length = sqrt(sum);
  for (int at = thread; at < count; at += THREADS) {
    long long row = rows[at];
    out[at + blockIdx.x * ld] = fitted[row] / ((poles[row] - origin) - shift) / length;
  }
}

// Rotations of pairs of columns, one after the other; a row for each thread.
extern "C" __global__ void rotate_columns(double* z, long long ld, long long rows, const long long* __restrict__ pairs,
                                          const double* __restrict__ factors, int count) {
  long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  for (int at = 0; at < count; ++at) {
    double *p = z + row + pairs[2 * at] * ld, *q = z + row + pairs[2 * at + 1] * ld;
    double c = factors[2 * at], s = factors[2 * at + 1], one = *p, other = *q;
    *p = c * one + s * other;
    *q = c * other - s * one;
  }
}

// One eigenvalue of a tridiagonal matrix for each thread, by bisection.
extern "C" __global__ void bisected_values(const double* __restrict__ d, const double* __restrict__ squares, int order,
                                           int first, int count, double low, double high, double pivot, double tolerance,
                                           double* __restrict__ values) {
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= count) return;
  int wanted = first + at;
  // More halvings than a bracket of finite numbers can have.
  for (int step = 0; step < 1200; ++step) {
    double middle = low + (high - low) / 2;
    if (!(high - low > tolerance + 2 * EPS * fmax(fabs(low), fabs(high)))) break;
    int below = 0;
    double last = 1;
    for (int i = 0; i < order; ++i) {
      last = d[i] - middle - (i ? squares[i - 1] / last : 0.0);
      if (fabs(last) < pivot) last = -pivot;
      below += last < 0;
    }
    if (below > wanted)
      high = middle;
    else
      low = middle;
  }
  values[at] = low + (high - low) / 2;
}
