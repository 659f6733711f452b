// What is between GPUs of one host, and between a GPU and its host: memory that others write, and time.

__device__ __forceinline__ unsigned load_acquired(const unsigned* p) {
  unsigned found;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(p) : "memory");
  return found;
}
__device__ __forceinline__ void store_released(unsigned* p, unsigned value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
// Nanoseconds of a clock of the device.
__device__ __forceinline__ long long now() {
  long long found;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(found));
  return found;
}
// Waits for a word of another GPU, or for the host to say that the run is over.
extern "C" __global__ void wait_for_word(long long word, long long over) {
  for (unsigned turn = 1; !load_acquired((const unsigned*)word); ++turn)
    if (turn % 64 == 0 && *(volatile unsigned*)over) return;
}
// Waits until the words of other GPUs, one a thread, have come as far as this one's, or the host says that the run is over.
extern "C" __global__ void wait_for_words(long long own, const long long* others, long long over) {
  const unsigned mine = load_acquired((const unsigned*)own);
  const unsigned* other = (const unsigned*)others[threadIdx.x];
  for (unsigned turn = 1; (int)(load_acquired(other) - mine) < 0; ++turn)
    if (turn % 64 == 0 && *(volatile unsigned*)over) return;
}
