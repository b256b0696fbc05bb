// Optimizer steps computed backwards, in one pass over memory. inverse_step.py gives the constants.
//
// Legend: T is the type in memory, A the type of the arithmetic (float, or double for double). Column 0 is the
// parameter, columns 1.. are its state. Every value is loaded, computed in A, and rounded to T once.
//
// What is recorded must be computed with the same bits when it is taken back, by another loop over the same
// formula. So this file is compiled with -ffp-contract=off and without -ffast-math: every operation is IEEE's.
//
// It is compiled twice: for a CPU when swift is installed, and for a device (`SWIFT_DEVICE`) when a rank starts, by a
// compiler that has no headers. `BOTH` marks what both need.

#ifdef __CUDACC__
#define BOTH __host__ __device__ inline
#else
#define BOTH inline
#endif

#ifdef SWIFT_DEVICE
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long;
using uint64_t = unsigned long;
#else
#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>
using std::memcpy;
using std::sqrt;
#endif

namespace {

constexpr int MOST = 3;  // columns

// --- types in memory ---

struct Bfloat16 {
  uint16_t bits;
};

template <class T> struct As;
template <> struct As<float> {
  using Wide = float;
  using Word = uint32_t;
  using Signed = int32_t;
  static constexpr float epsilon = 0x1p-23f;
};
template <> struct As<double> {
  using Wide = double;
  using Word = uint64_t;
  using Signed = int64_t;
  static constexpr double epsilon = 0x1p-52;
};
template <> struct As<Bfloat16> {
  using Wide = float;
  using Word = uint16_t;
  using Signed = short;
  static constexpr float epsilon = 0x1p-7f;
};

template <class To, class From> BOTH To cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits of one width");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

template <class T> BOTH typename As<T>::Wide widen(T value) { return static_cast<typename As<T>::Wide>(value); }
template <> BOTH float widen(Bfloat16 value) { return cast<float>(uint32_t{value.bits} << 16); }

template <class T> BOTH typename As<T>::Word rounded(typename As<T>::Wide value) {
  return cast<typename As<T>::Word>(static_cast<T>(value));
}
template <> BOTH uint16_t rounded<Bfloat16>(float value) {
  uint32_t bits = cast<uint32_t>(value);
  uint32_t even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>(value == value ? even : 0x7fc0);
}

// --- the rules, for one element: p and s are as after the step, and become as before it ---

template <class A> BOTH bool finite(A x) { return x - x == 0; }

// m ← β·m + (1 - β)·g, backwards; fade is (1 - β)/β.
template <class A> BOTH A forget(A m, A g, A fade) { return m + (m - g) * fade; }

// v ← old·v + fresh·g², backwards.
template <class A> struct Second {
  A old, fresh, least;  // least: the type's epsilon, or -1: leave what rounding has eaten as it is
  A by_old, by_fresh;   // multiplying is several times faster than dividing

  BOTH bool back(A& v, A g) const {
    v = v * by_old - g * g * by_fresh;
    if (!(least >= 0)) return true;
    A after = v * old + g * g * fresh;
    bool known = finite(v) && finite(after);
    A floor = after * least;
    floor = floor < 0 ? A(0) : floor;
    v = v > floor ? v : floor;
    v = known ? v : A(0);
    return known;
  }
};

template <class A> struct Constants {
  const double* at;
  A least;
  BOTH A take() { return static_cast<A>(*at++); }
  BOTH Second<A> second() {
    A old = take(), fresh = take();
    return {old, fresh, least, 1 / old, fresh / old};
  }
};

template <class A> struct Sgd {
  static constexpr int state = 0;
  A rate, grow;
  BOTH explicit Sgd(Constants<A> c) : rate(c.take()), grow(c.take()) {}
  BOTH void back(A& p, A g, A*) const { p = (p + rate * g) * grow; }
};

template <class A> struct Momentum {
  static constexpr int state = 1;
  A rate, grow, by_buffer, sign, decay, share, grow_back;
  bool nesterov;
  BOTH explicit Momentum(Constants<A> c)
      : rate(c.take()), grow(c.take()), by_buffer(c.take()), sign(c.take()), decay(c.take()), share(c.take()),
        grow_back(1 / c.take()), nesterov(c.take() != 0) {}
  BOTH void back(A& p, A g, A* s) const {
    p = p + by_buffer * s[0];
    if (nesterov) p = (p + rate * g) * grow;
    A used = sign * g + decay * p;
    s[0] = (s[0] - share * used) * grow_back;
  }
};

// Adam, AdamW and LAMB.
template <class A> struct Adam {
  static constexpr int state = 2;
  A rate, size, floor, grow, sign, decay, fade;  // rate and size are apart: LAMB's product may overflow
  Second<A> second;
  bool scaled;  // by the root of the second moment; not if the rate is 0, where 0/0 would be no number
  BOTH explicit Adam(Constants<A> c)
      : rate(c.take()), size(c.take()), floor(c.take()), grow(c.take()), sign(c.take()), decay(c.take()),
        fade(c.take()), second(c.second()), scaled(c.at[0] != 0) {}
  BOTH void back(A& p, A g, A* s) const {
    A denominator = scaled ? sqrt(s[1]) + floor : A(1);
    p = (p + rate * (size * (s[0] / denominator))) * grow;
    A used = sign * g + decay * p;
    s[0] = forget(s[0], used, fade);
    if (!second.back(s[1], used)) s[0] = 0;
  }
};

template <class A> struct Lion {
  static constexpr int state = 1;
  A rate, grow, sign, fade, share, first;
  bool sane;
  BOTH explicit Lion(Constants<A> c)
      : rate(c.take()), grow(c.take()), sign(c.take()), fade(c.take()), share(c.take()), first(c.take()),
        sane(c.least >= 0) {}
  BOTH void back(A& p, A g, A* s) const {
    A used = sign * g;
    A m = forget(s[0], used, fade);
    m = !sane || finite(m) ? m : A(0);
    s[0] = m;
    A way = first != 0 ? used : m + (used - m) * share;
    A step = way > 0 ? rate : (way < 0 ? -rate : (way == way ? A(0) : way));
    p = (p + step) * grow;
  }
};

// --- what a computation backwards misses ---

constexpr int32_t ESCAPED = -128;  // the code of a difference that does not fit

template <class T> BOTH int32_t code_of(typename As<T>::Word old, typename As<T>::Word estimate) {
  using Word = typename As<T>::Word;
  Word difference = static_cast<Word>(old - estimate);
  bool fits = static_cast<Word>(difference + 127) <= static_cast<Word>(254);
  return fits ? static_cast<int32_t>(static_cast<typename As<T>::Signed>(difference)) : ESCAPED;
}

#ifdef SWIFT_DEVICE
// --- a device: one thread for each element of one tensor, in turn ---

enum : int { RECORD = 1, UNDO = 2 };  // as in kernels.py

}  // namespace

// Compiled for one type and one rule. RECORD: `codes` [columns, total] gets the differences of `total` flat elements,
// this tensor's from `flat` on; those that do not fit go into `where` and `values` [columns, room], and are counted.
// UNDO: the live tensors become what they were, but for these.
extern "C" __global__ void swift_codes(int task, int columns, int n, int flat, int total, int room,
                                       const SWIFT_TYPE* gradient, SWIFT_TYPE* live0, SWIFT_TYPE* live1,
                                       SWIFT_TYPE* live2, const As<SWIFT_TYPE>::Word* old0,
                                       const As<SWIFT_TYPE>::Word* old1, const As<SWIFT_TYPE>::Word* old2,
                                       signed char* codes, int* where, As<SWIFT_TYPE>::Word* values, int* counts,
                                       double c0, double c1, double c2, double c3, double c4, double c5, double c6,
                                       double c7, double c8, double c9) {
  using T = SWIFT_TYPE;
  using A = As<T>::Wide;
  using Word = As<T>::Word;
  const double constants[] = {c0, c1, c2, c3, c4, c5, c6, c7, c8, c9};
  const SWIFT_RULE<A> rule(Constants<A>{constants, A(-1)});
  T* const live[] = {live0, live1, live2};
  const Word* const old[] = {old0, old1, old2};
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
    A value[MOST] = {};  // of the columns
    for (int k = 0; k <= SWIFT_RULE<A>::state; k++) value[k] = widen(live[k][i]);
    rule.back(value[0], widen(gradient[i]), value + 1);
    for (int k = 0; k <= SWIFT_RULE<A>::state; k++) {
      if (k >= columns) break;
      Word estimate = rounded<T>(value[k]);
      signed char& code = codes[int64_t(k) * total + flat + i];
      if (task == UNDO) {
        reinterpret_cast<Word*>(live[k])[i] = static_cast<Word>(estimate + static_cast<Word>(int32_t{code}));
        continue;
      }
      code = static_cast<signed char>(code_of<T>(old[k][i], estimate));
      if (code != ESCAPED) continue;
      int slot = atomicAdd(counts + k, 1);
      if (slot >= room) continue;
      where[int64_t(k) * room + slot] = static_cast<int>(flat + i);
      values[int64_t(k) * room + slot] = old[k][i];
    }
  }
}
#else

// --- tensors and threads ---

constexpr int64_t BLOCK = 128;            // elements computed at a time, in the first-level cache
constexpr int64_t PER_THREAD = 1 << 15;   // fewer elements are not worth a thread

// Some tensors of one dtype, as pieces of a range of flat elements.
struct Table {
  int64_t tensors;
  const int64_t* sizes;
  void* const* gradients;
  void* const* columns[MOST];
  void* const* old[MOST];
};

// Calls work(tensor, begin within it, flat begin, count) for blocks of [from, to).
template <class Work> void blocks(const Table& table, int64_t from, int64_t to, Work work) {
  int64_t start = 0;
  for (int64_t t = 0; t < table.tensors && start < to; start += table.sizes[t++]) {
    int64_t end = std::min(to, start + table.sizes[t]);
    for (int64_t at = std::max(from, start); at < end; at += BLOCK)
      work(t, at - start, at, std::min(BLOCK, end - at));
  }
}

// GOMP_parallel, of the OpenMP that torch has loaded: its threads keep their processors busy for a while after each
// of torch's operations, so that other threads would have to wait for them.
using Team = void (*)(void (*)(void*), void*, unsigned, unsigned);

template <class Work> struct Shared {
  int64_t total, parts, each;
  Work work;
  std::fenv_t environment{};  // the caller's: a thread that flushes denormals and one that does not have other bits
  std::atomic<int64_t> next{0};

  static void run(void* shared) {
    auto& mine = *static_cast<Shared*>(shared);
    std::fenv_t own;
    std::fegetenv(&own);
    std::fesetenv(&mine.environment);
    for (int64_t part = mine.next++; part < mine.parts; part = mine.next++)
      mine.work(std::min(mine.total, part * mine.each), std::min(mine.total, (part + 1) * mine.each));
    std::fesetenv(&own);
  }
};

template <class Work> void spread(int64_t total, int threads, Team team, Work work) {
  int64_t parts = std::max<int64_t>(1, std::min<int64_t>(threads, total / PER_THREAD));
  Shared<Work> shared{total, parts, (total / parts + BLOCK) / BLOCK * BLOCK, work};
  std::fegetenv(&shared.environment);
  // All of torch's threads, also if there are fewer parts: a smaller team would end those that are left over.
  if (parts > 1 && team != nullptr) return team(&Shared<Work>::run, &shared, static_cast<unsigned>(threads), 0);
  std::vector<std::thread> others;
  try {
    for (int64_t part = 1; part < parts; part++) others.emplace_back(&Shared<Work>::run, &shared);
  } catch (const std::system_error&) {
    // No more threads are to be had: those that are there do all parts.
  }
  Shared<Work>::run(&shared);
  for (std::thread& other : others) other.join();
}

// A rule and its constants, for blocks of any type that is computed in A.
template <class A> struct Rule {
  virtual ~Rule() = default;
  virtual int state() const = 0;
  virtual void back(A (*column)[BLOCK], const A* gradient, int64_t n) const = 0;
};

template <class A, class R> struct RuleOf final : Rule<A> {
  R rule;
  explicit RuleOf(const Constants<A>& c) : rule(c) {}
  int state() const override { return R::state; }
  void back(A (*__restrict column)[BLOCK], const A* __restrict gradient, int64_t n) const override {
    const R mine = rule;
    for (int64_t i = 0; i < n; i++) {
      A s[R::state + 1];
      for (int k = 0; k < R::state; k++) s[k] = column[1 + k][i];
      A p = column[0][i];
      mine.back(p, gradient[i], s);
      column[0][i] = p;
      for (int k = 0; k < R::state; k++) column[1 + k][i] = s[k];
    }
  }
};

// The next block's memory: many streams are read in turn, which the processor does not foresee.
template <class T> inline void fetch_next(const T* values, int64_t n) {
  for (int64_t i = 0; i < n; i += int64_t(64 / sizeof(T))) __builtin_prefetch(values + n + i);
}

// One block's values, computed backwards.
template <class T> struct Values {
  using A = typename As<T>::Wide;
  A column[MOST][BLOCK];
  A gradient[BLOCK];

  static void load(A* __restrict to, const void* from, int64_t begin, int64_t n) {
    const T* values = static_cast<const T*>(from) + begin;
    fetch_next(values, n);
    for (int64_t i = 0; i < n; i++) to[i] = widen(values[i]);
  }

  void back(const Rule<A>& rule, const Table& table, int64_t t, int64_t begin, int64_t n) {
    load(gradient, table.gradients[t], begin, n);
    for (int k = 0; k <= rule.state(); k++) load(column[k], table.columns[k][t], begin, n);
    rule.back(column, gradient, n);
  }
};

// --- codes, by blocks ---

// A column's differences are kept in a byte each. Those that do not fit stand at the least code; their elements are
// kept whole.
struct Escapes {
  std::atomic<int64_t> count;
  int64_t room;
  int32_t* where;
  void* values;
};

template <class T>
int64_t encode(const typename As<T>::Wide* __restrict estimate, const typename As<T>::Word* __restrict old,
               int8_t* __restrict code, int64_t n) {
  uint32_t escaped = 0;
  for (int64_t i = 0; i < n; i++) {
    int32_t found = code_of<T>(old[i], rounded<T>(estimate[i]));
    escaped += found == ESCAPED;
    code[i] = static_cast<int8_t>(found);
  }
  return escaped;
}

template <class T>
void record(const Rule<typename As<T>::Wide>& rule, const Table& table, int8_t* const* codes, int columns,
            Escapes* escapes, int64_t from, int64_t to) {
  using Word = typename As<T>::Word;
  Values<T> values;
  blocks(table, from, to, [&](int64_t t, int64_t begin, int64_t flat, int64_t n) {
    values.back(rule, table, t, begin, n);
    for (int k = 0; k < columns; k++) {
      const Word* old = static_cast<const Word*>(table.old[k][t]) + begin;
      fetch_next(old, n);
      int8_t* code = codes[k] + flat;
      int64_t escaped = encode<T>(values.column[k], old, code, n);
      if (!escaped) continue;
      int64_t slot = escapes[k].count.fetch_add(escaped);
      if (slot + escaped > escapes[k].room) continue;  // the column will be kept whole
      for (int64_t i = 0; i < n; i++) {
        if (code[i] != ESCAPED) continue;
        escapes[k].where[slot] = static_cast<int32_t>(flat + i);
        static_cast<Word*>(escapes[k].values)[slot++] = old[i];
      }
    }
  });
}

template <class T>
void add(const typename As<T>::Wide* __restrict estimate, const int8_t* __restrict code,
         typename As<T>::Word* __restrict to, int64_t n) {
  using Word = typename As<T>::Word;
  for (int64_t i = 0; i < n; i++)
    to[i] = static_cast<Word>(rounded<T>(estimate[i]) + static_cast<Word>(static_cast<int32_t>(code[i])));
}

template <class T>
void undo(const Rule<typename As<T>::Wide>& rule, const Table& table, int8_t* const* codes, int columns, int64_t from,
          int64_t to) {
  Values<T> values;
  blocks(table, from, to, [&](int64_t t, int64_t begin, int64_t flat, int64_t n) {
    values.back(rule, table, t, begin, n);
    for (int k = 0; k < columns; k++) {
      auto* live = static_cast<typename As<T>::Word*>(table.columns[k][t]) + begin;
      add<T>(values.column[k], codes[k] + flat, live, n);
    }
  });
}

template <class T>
void invert(const Rule<typename As<T>::Wide>& rule, const Table& table, int columns, std::atomic<int64_t>& lost,
            int64_t from, int64_t to) {
  using A = typename As<T>::Wide;
  Values<T> values;
  int64_t bad = 0;
  blocks(table, from, to, [&](int64_t t, int64_t begin, int64_t, int64_t n) {
    values.back(rule, table, t, begin, n);
    for (int k = 0; k < columns; k++) {
      auto* live = static_cast<typename As<T>::Word*>(table.columns[k][t]) + begin;
      const A* found = values.column[k];
      uint32_t here = 0;
      for (int64_t i = 0; i < n; i++) {
        live[i] = rounded<T>(found[i]);
        here += !finite(widen(cast<T>(live[i])));
      }
      bad += k == 0 ? here : 0;
    }
  });
  lost += bad;
}

// Puts whole elements of one column back where they were.
template <class Word>
void patch(const Table& table, int column, const int32_t* where, const Word* values, int64_t count) {
  std::vector<int64_t> starts(static_cast<size_t>(table.tensors));
  for (int64_t t = 0, start = 0; t < table.tensors; start += table.sizes[t++]) starts[static_cast<size_t>(t)] = start;
  for (int64_t i = 0; i < count; i++) {
    int64_t t = std::upper_bound(starts.begin(), starts.end(), int64_t{where[i]}) - starts.begin() - 1;
    static_cast<Word*>(table.columns[column][t])[where[i] - starts[static_cast<size_t>(t)]] = values[i];
  }
}

// --- calls from Python (kernels.py) ---

enum Task : int32_t { INVERT, RECORD, UNDO };

struct Call {
  int32_t task, rule, dtype, threads, sane, columns;
  Team team;  // or null
  const double* constants;
  int8_t* codes[MOST];
  Table table;
  int64_t room;
  int32_t* where[MOST];
  void* values[MOST];
  int64_t counts[MOST];  // of escapes by column, out of RECORD and into UNDO; out of INVERT: lost parameters
};

template <class T> void run_with(Call& call, const Rule<typename As<T>::Wide>& rule) {
  int64_t total = 0;
  for (int64_t t = 0; t < call.table.tensors; t++) total += call.table.sizes[t];
  if (call.task == INVERT) {
    std::atomic<int64_t> lost{0};
    spread(total, call.threads, call.team,
           [&](int64_t from, int64_t to) { invert<T>(rule, call.table, call.columns, lost, from, to); });
    call.counts[0] = lost;
  } else if (call.task == RECORD) {
    Escapes escapes[MOST];
    for (int k = 0; k < MOST; k++) {
      escapes[k].count = 0;
      escapes[k].room = call.room;
      escapes[k].where = call.where[k];
      escapes[k].values = call.values[k];
    }
    spread(total, call.threads, call.team,
           [&](int64_t from, int64_t to) { record<T>(rule, call.table, call.codes, call.columns, escapes, from, to); });
    for (int k = 0; k < MOST; k++) call.counts[k] = escapes[k].count;
  } else {
    spread(total, call.threads, call.team,
           [&](int64_t from, int64_t to) { undo<T>(rule, call.table, call.codes, call.columns, from, to); });
    using Word = typename As<T>::Word;
    for (int k = 0; k < call.columns; k++)
      patch(call.table, k, call.where[k], static_cast<const Word*>(call.values[k]), call.counts[k]);
  }
}

template <class A> std::unique_ptr<Rule<A>> rule_of(int number, const Constants<A>& c) {
  switch (number) {  // the order of kernels.py
    case 0: return std::make_unique<RuleOf<A, Sgd<A>>>(c);
    case 1: return std::make_unique<RuleOf<A, Momentum<A>>>(c);
    case 2: return std::make_unique<RuleOf<A, Adam<A>>>(c);
    case 3: return std::make_unique<RuleOf<A, Lion<A>>>(c);
    default: return nullptr;
  }
}

template <class T> int run(Call& call) {
  using A = typename As<T>::Wide;
  auto rule = rule_of<A>(call.rule, {call.constants, call.sane ? static_cast<A>(As<T>::epsilon) : A(-1)});
  if (!rule) return 1;
  run_with<T>(call, *rule);
  return 0;
}

}  // namespace

// What it was compiled from: another version's Call has another layout.
extern "C" const char* swift_optim_source() { return SWIFT_SOURCE; }

extern "C" int swift_optim_run(Call* call) {
  switch (call->dtype) {
    case 0: return run<float>(*call);
    case 1: return run<double>(*call);
    case 2: return run<Bfloat16>(*call);
    default: return 2;
  }
}
#endif  // SWIFT_DEVICE
