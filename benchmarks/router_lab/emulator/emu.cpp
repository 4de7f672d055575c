#include "emu_kernels.h"
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <random>
#include <numeric>
#include <array>
#include <string>
Dim threadIdx, blockIdx, gridDim, blockDim;
std::vector<Fiber> fibers; ucontext_t main_context; int current;
Barrier block_barrier, warp_barrier[32]; unsigned long long lanes_buf[32][32];
std::function<void()> body;
void yield_fiber() { swapcontext(&fibers[current].c, &main_context); }
void wait_on(Barrier& b, int count) {
  unsigned g = b.generation;
  if (++b.arrived == count) { b.arrived = 0; b.generation++; return; }
  while (b.generation == g) yield_fiber();
}
static void entry() { body(); fibers[current].done = true; swapcontext(&fibers[current].c, &main_context); }
void run_block(unsigned b, unsigned grid, unsigned threads) {
  blockIdx.x = b; gridDim.x = grid; blockDim.x = threads;
  fibers.resize(threads);
  for (auto& f : fibers) { getcontext(&f.c); f.stack.resize(48 << 10); f.c.uc_stack.ss_sp = f.stack.data(); f.c.uc_stack.ss_size = f.stack.size(); f.c.uc_link = &main_context; f.done = false; makecontext(&f.c, entry, 0); }
  bool left = true; long turns = 0;
  while (left) {
    left = false;
    for (unsigned i = 0; i < threads; i++) if (!fibers[i].done) { left = true; current = i; threadIdx.x = i; swapcontext(&main_context, &fibers[i].c); }
    sched_yield();
    if (++turns > 4000000) { fprintf(stderr, "block %u stuck\n", b); _exit(3); }
  }
}
int run_grid(unsigned grid, unsigned threads) {
  std::vector<pid_t> ids;
  for (unsigned b = 0; b < grid; b++) { pid_t p = fork(); if (!p) { run_block(b, grid, threads); _exit(0); } ids.push_back(p); }
  int bad = 0; for (pid_t p : ids) { int s; waitpid(p, &s, 0); bad |= s; } return bad;
}
template <class T> T* shared_array(size_t n) { return (T*)mmap(0, n * sizeof(T) + 64, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0); }
static unsigned long long* STATE;
static int failures, ran;
struct Test { int T, E, k; bool half, biased, sigmoid, renorm; const char* fill; };
template <class X, int B, int LANES, int EACH> void call(const Test& t, const X* x, const float* bias, int* index, float* weight, int* place, int* counts, int* offsets) {
  int per = 32 / LANES, each = t.T <= 64 ? t.T : max(16, (((t.T + 131) / 132 + per - 1) / per) * per), grid = (t.T + each - 1) / each;
  if (grid > 24) { each = ((t.T + 19) / 20 + per - 1) / per * per; grid = (t.T + each - 1) / each; }
  body = [=] { router<X, B, LANES, EACH>(x, bias, index, weight, place, counts, offsets, STATE, t.T, t.E, t.k, each, t.sigmoid, t.renorm, 2.5f); };
  if (run_grid(grid, 512)) { printf("stuck\n"); failures++; }
}
template <class X, int B> void pick(const Test& t, int lanes, const X* x, const float* bias, int* i, float* w, int* p, int* c, int* o) {
  if (t.T == 1 && lanes == 0) { body = [=] { if (t.E <= 256) one::router_one<X, 8>(x, bias, i, w, p, c, o, t.E, t.k, t.sigmoid, t.renorm, 2.5f); else one::router_one<X, 16>(x, bias, i, w, p, c, o, t.E, t.k, t.sigmoid, t.renorm, 2.5f); }; if (run_grid(1, 32)) failures++; return; }
  if (lanes == 4) { if constexpr (!B) call<X, B, 4, 64>(t, x, bias, i, w, p, c, o); return; }
  int held = lanes * 8 >= t.E ? 8 : lanes * 16 >= t.E ? 16 : 32;
  if (lanes == 8) { if (held == 8) call<X, B, 8, 8>(t, x, bias, i, w, p, c, o); else if (held == 16) call<X, B, 8, 16>(t, x, bias, i, w, p, c, o); else call<X, B, 8, 32>(t, x, bias, i, w, p, c, o); }
  else { if (held == 8) call<X, B, 16, 8>(t, x, bias, i, w, p, c, o); else if (held == 16) call<X, B, 16, 16>(t, x, bias, i, w, p, c, o); else call<X, B, 16, 32>(t, x, bias, i, w, p, c, o); }
}
void test(const Test& t, int lanes) {
  ran++;
  std::mt19937 g(t.T * 31 + t.E * 7 + t.k);
  std::normal_distribution<float> normal;
  size_t n = (size_t)t.T * t.E, m = (size_t)t.T * t.k;
  float* x = shared_array<float>(n); bf16* h = shared_array<bf16>(n); float* bias = shared_array<float>(t.E);
  std::string f = t.fill;
  for (size_t i = 0; i < n; i++) {
    float v = normal(g);
    if (f == "equal") v = 0; if (f == "few") v = roundf(v * 2) / 2; if (f == "masked" && v < 1.9f) v = -INFINITY; if (f == "infrows" && (i / t.E) % 3 == 0) v = -INFINITY;
    if (f == "nan" && v > 2.9f) v = NAN; if (f == "big") v = v * 50 + 1e4f; if (f == "tiny") v *= 1e-40f; if (f == "huge") v *= 2e37f; if (f == "zeros") v = v > 0 ? 0.0f : -0.0f;
    if (t.half) { h[i] = emu_bf(v); v = to_float(h[i]); }
    x[i] = v;
  }
  for (int e = 0; e < t.E; e++) bias[e] = normal(g) * (t.sigmoid ? 0.1f : 0.001f);
  int *index = shared_array<int>(m), *place = shared_array<int>(m), *counts = shared_array<int>(t.E), *offsets = shared_array<int>(t.E + 1); float* weight = shared_array<float>(m);
  for (int round = 0; round < 2; round++) {
    for (size_t i = 0; i < m; i++) index[i] = place[i] = -1, weight[i] = -7; for (int e = 0; e < t.E; e++) counts[e] = -1, offsets[e] = -1;
    if (t.half) { if (t.biased) pick<bf16, 1>(t, lanes, h, bias, index, weight, place, counts, offsets); else pick<bf16, 0>(t, lanes, h, (float*)nullptr, index, weight, place, counts, offsets); }
    else { if (t.biased) pick<float, 1>(t, lanes, x, bias, index, weight, place, counts, offsets); else pick<float, 0>(t, lanes, x, (float*)nullptr, index, weight, place, counts, offsets); }
    // expected
    std::vector<int> want(m), cnt(t.E, 0); int wrong = 0, wrongw = 0;
    for (int r = 0; r < t.T; r++) {
      const float* row = x + (size_t)r * t.E; bool bad = false, empty = true; double top = -INFINITY;
      for (int e = 0; e < t.E; e++) bad |= row[e] != row[e], empty &= row[e] == -INFINITY, top = std::max(top, (double)row[e]);
      std::vector<double> score(t.E), by(t.E); double sum = 0;
      for (int e = 0; e < t.E; e++) sum += exp(row[e] - top);
      for (int e = 0; e < t.E; e++) { score[e] = t.sigmoid ? 1 / (1 + exp(-(double)row[e])) : exp(row[e] - top) / sum; by[e] = bad || empty ? 0 : t.biased ? score[e] + bias[e] : row[e]; }
      std::vector<int> order(t.E); std::iota(order.begin(), order.end(), 0); std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return by[a] > by[b]; });
      double total = 0; for (int i = 0; i < t.k; i++) total += score[order[i]];
      for (int i = 0; i < t.k; i++) {
        int e = index[(size_t)r * t.k + i]; want[r * t.k + i] = e;
        if (e < 0 || e >= t.E) { wrong++; continue; }
        cnt[e]++;
        if (e != order[i] && !(t.biased && fabs(by[e] - by[order[i]]) < 1e-6)) wrong++;
        double w = bad ? NAN : empty ? 0 : score[e] * 2.5 / (t.renorm ? total : 1); float got = weight[(size_t)r * t.k + i];
        if (bad ? got == got : !(fabs(got - w) <= 1e-4 * fabs(w) + 1e-7)) { if (!wrongw) printf("  weight row %d i %d got %g want %g\n", r, i, got, w); wrongw++; }
      }
    }
    int wrongc = 0, wrongp = 0, at = 0;
    for (int e = 0; e < t.E; e++) { wrongc += counts[e] != cnt[e] || offsets[e] != at; at += cnt[e]; } wrongc += offsets[t.E] != at;
    std::vector<int> next(t.E, 0); for (int e = 1; e < t.E; e++) next[e] = next[e - 1] + cnt[e - 1];
    for (size_t i = 0; i < m; i++) if (want[i] >= 0 && want[i] < t.E) wrongp += place[i] != next[want[i]]++;
    bool ok = !wrong && !wrongw && !wrongc && !wrongp; failures += !ok;
    if (!ok) printf("WRONG T%d E%d k%d half%d bias%d sig%d renorm%d %s lanes%d round %d: index %d weight %d counts %d place %d\n", t.T, t.E, t.k, t.half, t.biased, t.sigmoid, t.renorm, t.fill, lanes, round, wrong, wrongw, wrongc, wrongp);
  }
  munmap(x, n * 4); munmap(h, n * 2);
}
int main(int argc, char** argv) {
  setbuf(stdout, nullptr);
  STATE = shared_array<unsigned long long>(2 + 2 * 9 * 256 + 144 * 256);
  bool quick = argc > 1;
  int shapes[][4] = {{1,256,8,0},{1,8,2,0},{1,60,6,0},{1,255,16,0},{1,509,10,0},{1,1,1,0},{2,256,8,8},{17,33,4,8},{64,256,8,8},{100,256,8,8},{131,60,6,8},{90,255,16,16},{70,509,10,16},{66,8,2,8},{300,128,8,8},{100,256,8,4},{150,256,8,4},{67,1,1,8},{130,512,16,16}};
  for (auto& s : shapes) for (int half = 0; half < 2; half++) for (int mode = 0; mode < 4; mode++) {
    if (s[3] == 4 && (mode == 2 || mode == 3)) continue;
    test({s[0], s[1], s[2], half == 1, mode >= 2, mode == 2, mode != 1, "normal"}, s[3]); if (quick) break; }
  printf("%d shapes, %d failures\n", ran, failures);
  for (const char* f : {"equal", "few", "masked", "infrows", "nan", "big", "tiny", "huge", "zeros"}) for (auto& s : {std::array<int,4>{1,256,8,0}, {100,256,8,8}, {100,100,5,8}, {80,300,12,16}, {100,256,8,4}, {1,300,12,0}}) for (int half = 0; half < 2; half++)
    test({s[0], s[1], s[2], half == 1, false, false, true, f}, s[3]);
  printf("%d in all, %d failures\n", ran, failures);
  return failures != 0;
}
