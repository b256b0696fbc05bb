// A device of torch for tests: as asynchronous as CUDA, and stricter. It computes with the CPU's own kernels.
//
// The host puts work into streams and goes on; a stream is a thread that does its work in order, later. A kernel gets
// addresses, and nothing that keeps memory alive: whoever frees a tensor too early, or orders two streams wrongly, gets
// wrong bits. Tests make that certain, not likely: they hold a stream (`hold`, `release`), and the device is as late
// as they want.
//
//   host thread                                    stream (a thread)
//   launch: check devices, learn the results'
//     form from meta kernels (cached), allocate,
//     draw from the generator ------ a task -----> the CPU's kernel, on the engine's addresses
//   Event.record ------------------- a task -----> the event has passed
//   Tensor.cpu(), item(), … : a wait of the host; whoever set `on_wait` hears of it first, and may refuse it
//
// Memory: each device has one region that is mapped twice. What `data_ptr()` shows is the mapping that nobody may
// touch, so the host dies of a stray read (SIGSEGV); streams know the other one. A block that is freed is handed out
// again at once, as CUDA's caching allocator does; only other streams that were recorded on it are waited for. With the
// next allocation on its stream, of whatever size, it is overwritten in the order of that stream: somebody else could
// have got it. Fresh memory is 0xFF bytes: NaN.
//
// An error in a kernel is sticky: from then on every call fails. Nothing may be used in a fork. It knows no graphs, no
// communication between processes, and no kernel that the CPU does not have.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>

// Of ATen/autocast_mode.h, which would double the time to compile.
namespace at::autocast {
TORCH_API ScalarType get_autocast_dtype(DeviceType);
TORCH_API Tensor cached_cast(ScalarType, const Tensor&, DeviceType);
}  // namespace at::autocast

namespace {

using namespace c10;
using torch::jit::Stack;
using Clock = std::chrono::steady_clock;

constexpr auto KIND = DeviceType::PrivateUse1;
constexpr DispatchKeySet KEYS(DispatchKey::PrivateUse1);
constexpr DeviceIndex DEVICES = 2;
constexpr size_t MEMORY = size_t(8) << 30;
constexpr size_t GRAIN = 512;  // bytes: blocks are multiples of it

// --- Failure and waits of the host ---

std::mutex failure_lock;
std::string& failure = *new std::string;  // of the first kernel that failed
std::atomic<bool> failed{false};

void fail(const std::string& what) {
  std::lock_guard lock(failure_lock);
  if (!failed) failure = what;
  failed = true;
}

void check_failure() {
  if (!failed) return;
  std::lock_guard lock(failure_lock);
  throw AcceleratorError({__func__, __FILE__, __LINE__}, 1, "simulated device: an earlier kernel failed: " + failure);
}

using OnWait = int (*)(const char* what);  // not 0: it is refused
std::atomic<OnWait> on_wait{nullptr};

void host_waits(const std::string& what) {
  check_failure();
  if (auto call = on_wait.load())
    TORCH_CHECK(!call(what.c_str()), "simulated device: a wait of the host that is refused here: ", what);
}

std::atomic<double> patience_s{60};  // a wait of the host that takes longer is an error: a test must not hang

template <class Condition>
void wait_patiently(std::unique_lock<std::mutex>& lock, std::condition_variable& changed, const char* what,
                    Condition condition) {
  bool done = changed.wait_for(lock, std::chrono::duration<double>(patience_s), condition);
  TORCH_CHECK(done, "simulated device: the host has waited ", patience_s.load(), " s for ", what);
}

// --- Events and streams ---

// Whoever waits, waits for the record that was the last one when it asked.
class Event {
 public:
  int64_t record() {
    std::lock_guard lock(mutex_);
    return ++recorded_;
  }
  void pass(int64_t number) {
    {
      std::lock_guard lock(mutex_);
      passed_ = number;
      at_ = Clock::now();
    }
    changed_.notify_all();
  }
  int64_t recorded() {
    std::lock_guard lock(mutex_);
    return recorded_;
  }
  bool passed() {
    std::lock_guard lock(mutex_);
    return passed_ >= recorded_;
  }
  Clock::time_point passed_at() {
    std::lock_guard lock(mutex_);
    return at_;
  }
  void wait(int64_t number) {  // (a stream)
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return passed_ >= number; });
  }
  void host_wait() {
    std::unique_lock lock(mutex_);
    wait_patiently(lock, changed_, "an event", [this, number = recorded_] { return passed_ >= number; });
  }

  DeviceIndex device = -1;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t recorded_ = 0, passed_ = 0;
  Clock::time_point at_;
};
using SharedEvent = std::shared_ptr<Event>;

// Does its tasks in order, in a thread of its own.
class Queue {
 public:
  void push(std::function<void()> task) {
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    if (!started_) std::thread([this] { work(); }).detach();
    started_ = true;
    changed_.notify_all();
  }
  void wait_for(const SharedEvent& event) {
    push([event, number = event->recorded()] { event->wait(number); });
  }
  void record(const SharedEvent& event) {
    push([event, number = event->record()] { event->pass(number); });
  }
  bool idle() {
    std::lock_guard lock(mutex_);
    return tasks_.empty() && !busy_;
  }
  void host_wait() {
    std::unique_lock lock(mutex_);
    wait_patiently(lock, changed_, "a stream", [this] { return tasks_.empty() && !busy_; });
    check_failure();
  }

 private:
  void work() {
    at::AutoDispatchBelowADInplaceOrView below;
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
        busy_ = true;
      }
      try {
        task();
      } catch (const c10::Error& error) {
        fail(error.what_without_backtrace());
      } catch (const std::exception& error) {
        fail(error.what());
      }
      task = nullptr;  // what it holds is freed before it counts as done
      {
        std::lock_guard lock(mutex_);
        busy_ = false;
        if (tasks_.empty()) changed_.notify_all();
      }
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool busy_ = false, started_ = false;
};

// --- The machine: made by the first use, and never in a fork of a process that has one ---

struct Machine {
  char* host[DEVICES];    // where the host sees a device's memory, and may not touch it
  char* engine[DEVICES];  // the same memory, for streams
  size_t used[DEVICES] = {};
  std::deque<Queue> streams[DEVICES];
};
std::mutex machine_lock;
std::atomic<Machine*> the_machine{nullptr};
bool bad_fork = false;
thread_local DeviceIndex current_device = 0;
thread_local StreamId current_stream[DEVICES] = {};

Machine& machine() {
  TORCH_CHECK(!bad_fork, "Cannot re-initialize the simulated device in a forked subprocess");
  if (auto made = the_machine.load()) return *made;
  std::lock_guard lock(machine_lock);
  if (auto made = the_machine.load()) return *made;
  auto made = new Machine;
  for (int d = 0; d < DEVICES; ++d) {
    int file = memfd_create("simulated device", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, MEMORY) == 0, "no memory for the simulated device");
    auto map = [&](int access) { return (char*)mmap(nullptr, MEMORY, access, MAP_SHARED | MAP_NORESERVE, file, 0); };
    made->host[d] = map(PROT_NONE);
    made->engine[d] = map(PROT_READ | PROT_WRITE);
    close(file);
    made->streams[d].resize(1);  // the default stream
  }
  pthread_atfork(nullptr, nullptr, [] { bad_fork = true; });
  the_machine = made;
  return *made;
}

DeviceIndex checked(DeviceIndex d) {
  TORCH_CHECK(d < DEVICES, "simulated device: there is no device ", int(d));
  return d < 0 ? current_device : d;
}
Queue& queue_of(DeviceIndex d, StreamId stream) {
  auto& m = machine();
  std::lock_guard lock(machine_lock);
  return m.streams[d].at(stream);
}
Queue& queue_of(const Stream& stream) { return queue_of(stream.device_index(), stream.id()); }
Queue& current_queue(DeviceIndex d) { return queue_of(d, current_stream[d]); }

// Holds of streams, by number: what is behind one waits until it is released.
auto& holds = *new std::vector<SharedEvent>;
int64_t hold(int64_t d, int64_t stream) {
  auto event = std::make_shared<Event>();
  event->record();
  queue_of(DeviceIndex(d), stream).wait_for(event);
  std::lock_guard lock(machine_lock);
  holds.push_back(event);
  return int64_t(holds.size()) - 1;
}
void release(int64_t number) {
  std::lock_guard lock(machine_lock);
  holds.at(size_t(number))->pass(1);
}

// As torch.cuda._sleep, at 1 GHz: the current stream stands still, and no core is busy.
void sleep_cycles(int64_t cycles) {
  current_queue(current_device).push([cycles] { std::this_thread::sleep_for(std::chrono::nanoseconds(cycles)); });
}

StreamId new_stream(DeviceIndex d) {
  auto& m = machine();
  std::lock_guard lock(machine_lock);
  m.streams[d].emplace_back();
  return StreamId(m.streams[d].size()) - 1;
}

std::pair<DeviceIndex, char*> on_engine(const void* address) {
  auto& m = machine();
  for (DeviceIndex d = 0; d < DEVICES; ++d) {
    auto offset = (const char*)address - m.host[d];
    if (offset >= 0 && size_t(offset) < MEMORY) return {d, m.engine[d] + offset};
  }
  TORCH_CHECK(false, "simulated device: an address that is none of its memory");
}

// --- Memory of the device ---

struct Block {
  size_t bytes;
  DeviceIndex device;
  StreamId stream;          // it was made on
  std::set<StreamId> used;  // other streams that were recorded on it
};
std::mutex memory_lock;
auto& blocks = *new std::unordered_map<void*, Block>;
auto& free_blocks = *new std::map<std::tuple<DeviceIndex, StreamId, size_t>, std::vector<void*>>;
size_t live_bytes[DEVICES], live_bytes_max[DEVICES];

std::vector<void*> handed_back[DEVICES];  // and not overwritten yet

void hand_back(void* address) {
  std::lock_guard lock(memory_lock);
  auto& block = blocks.at(address);
  free_blocks[{block.device, block.stream, block.bytes}].push_back(address);
  handed_back[block.device].push_back(address);
}

// Whoever asks for memory on this stream might get any block that was handed back there: behind all that the stream has
// been given so far, their bytes are somebody else's. (Under memory_lock.)
void overwrite_handed_back(DeviceIndex d, StreamId stream) {
  auto& queue = queue_of(d, stream);
  std::erase_if(handed_back[d], [&](void* address) {
    auto& block = blocks.at(address);
    if (block.stream != stream) return false;
    queue.push([to = on_engine(address).second, bytes = block.bytes] { memset(to, 0xFF, bytes); });
    return true;
  });
}

void free_block(void* address) {
  if (!address || bad_fork) return;
  std::set<StreamId> used;
  DeviceIndex d;
  {
    std::lock_guard lock(memory_lock);
    auto& block = blocks.at(address);
    std::swap(used, block.used);
    used.erase(block.stream);
    d = block.device;
    live_bytes[d] -= block.bytes;
  }
  if (used.empty()) return hand_back(address);
  auto left = std::make_shared<std::atomic<size_t>>(used.size());
  for (auto stream : used)
    queue_of(d, stream).push([=] {
      if (--*left == 0) hand_back(address);
    });
}

struct DeviceMemory final : DeviceAllocator {
  DataPtr allocate(size_t wanted) override {
    auto& m = machine();
    check_failure();
    DeviceIndex d = current_device;
    if (!wanted) return {nullptr, nullptr, &free_block, Device(KIND, d)};
    size_t bytes = (wanted + GRAIN - 1) / GRAIN * GRAIN;
    std::lock_guard lock(memory_lock);
    overwrite_handed_back(d, current_stream[d]);
    auto& free = free_blocks[{d, current_stream[d], bytes}];
    void* address;
    if (!free.empty()) {
      address = free.back();
      free.pop_back();
    } else {
      TORCH_CHECK_WITH(OutOfMemoryError, m.used[d] + bytes <= MEMORY, "simulated device: no memory of ", bytes);
      address = m.host[d] + m.used[d];
      memset(m.engine[d] + m.used[d], 0xFF, bytes);
      m.used[d] += bytes;
      blocks[address] = Block{bytes, d, current_stream[d], {}};
    }
    live_bytes[d] += bytes;
    live_bytes_max[d] = std::max(live_bytes_max[d], live_bytes[d]);
    return {address, address, &free_block, Device(KIND, d)};
  }
  DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    auto [d, target] = on_engine(to);
    current_queue(d).push([target = target, source = on_engine(from).second, bytes] { memcpy(target, source, bytes); });
  }
  bool initialized() override { return the_machine != nullptr; }
  void emptyCache(MempoolId_t) override {}  // blocks are of one size each: there is nothing to join
  void recordStream(const DataPtr& data, Stream stream) override {
    if (!data.get_context()) return;
    std::lock_guard lock(memory_lock);
    auto& block = blocks.at(data.get_context());
    TORCH_CHECK(block.device == stream.device_index(), "simulated device: record_stream of another device's stream");
    block.used.insert(stream.id());
  }
  CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) override {
    std::lock_guard lock(memory_lock);
    CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = int64_t(live_bytes[d]);
    stats.allocated_bytes[0].peak = int64_t(live_bytes_max[d]);
    stats.reserved_bytes[0].current = int64_t(the_machine ? the_machine.load()->used[d] : 0);
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex d) override { live_bytes_max[d] = live_bytes[d]; }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) override { return {MEMORY - live_bytes[d], MEMORY}; }
} device_memory;
REGISTER_ALLOCATOR(KIND, &device_memory);

// --- Memory of the host that copies may reach while the host goes on ---

std::mutex pinned_lock;
auto& pinned = *new std::map<const char*, size_t>;

void pin(const void* address, size_t bytes) {
  std::lock_guard lock(pinned_lock);
  pinned[(const char*)address] = bytes;
}
void unpin(const void* address) {
  std::lock_guard lock(pinned_lock);
  TORCH_CHECK(pinned.erase((const char*)address), "simulated device: memory that was not pinned");
}
bool is_pinned(const void* address) {
  std::lock_guard lock(pinned_lock);
  auto after = pinned.upper_bound((const char*)address);
  if (after == pinned.begin()) return false;
  auto& [first, bytes] = *std::prev(after);
  return (const char*)address < first + bytes;
}

struct PinnedMemory final : Allocator {
  static void release(void* address) {
    unpin(address);
    free(address);
  }
  DataPtr allocate(size_t bytes) override {
    void* address = aligned_alloc(64, bytes / 64 * 64 + 64);
    pin(address, bytes);
    return {address, address, &release, Device(DeviceType::CPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
} pinned_memory;

// --- Random numbers: (seed, offset) on the host. A launch takes the next place; what it draws depends on it alone ---

struct Generator final : GeneratorImpl {
  static constexpr uint64_t PLACES = 4;  // as Philox: offsets are multiples of 4
  explicit Generator(DeviceIndex d) : GeneratorImpl(Device(KIND, d), KEYS) {}
  void set_current_seed(uint64_t seed) override { state_ = {seed, 0}; }
  void set_offset(uint64_t offset) override { state_[1] = offset; }
  uint64_t get_offset() const override { return state_[1]; }
  uint64_t current_seed() const override { return state_[0]; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return state_[0];
  }
  void set_state(const TensorImpl& state) override {
    TORCH_CHECK(state.is_cpu() && state.numel() == sizeof state_, "simulated device: no state of a generator");
    memcpy(state_.data(), state.data(), sizeof state_);
  }
  intrusive_ptr<TensorImpl> get_state() const override {
    at::Tensor state = at::detail::empty_cpu({sizeof state_}, kByte);
    memcpy(state.data_ptr(), state_.data(), sizeof state_);
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto clone = new Generator(device().index());
    clone->state_ = state_;
    return clone;
  }
  at::Generator next() {
    std::lock_guard lock(mutex_);
    uint64_t mixed = (state_[0] + 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 ^ (state_[1] + 1) * 0x94D049BB133111EB;
    state_[1] += PLACES;
    return at::make_generator<at::CPUGeneratorImpl>(mixed);
  }

 private:
  std::array<uint64_t, 2> state_ = {default_rng_seed_val, 0};
};

const at::Generator& default_generator(DeviceIndex d) {
  static auto& first = *new at::Generator(at::make_generator<Generator>(DeviceIndex(0)));
  static auto& second = *new at::Generator(at::make_generator<Generator>(DeviceIndex(1)));
  return checked(d) ? second : first;
}

at::Generator draw(const IValue& given, DeviceIndex d) {
  auto generator = given.isGenerator() ? given.toGenerator() : default_generator(d);
  TORCH_CHECK(generator.device().type() == KIND, "simulated device: a generator of ", generator.device());
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->next();
}

// --- What torch asks of an accelerator ---

struct Guard final : impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = KIND;  // (C10_REGISTER_GUARD_IMPL)
  DeviceType type() const override { return KIND; }
  Device exchangeDevice(Device d) const override {
    auto index = checked(d.index());
    return Device(KIND, std::exchange(current_device, index));
  }
  Device getDevice() const override { return Device(KIND, current_device); }
  void setDevice(Device d) const override { current_device = checked(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override { current_device = d.index(); }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }

  static Stream stream(Device d, StreamId id) { return Stream(Stream::UNSAFE, d, id); }
  static Device indexed(Device d) { return Device(KIND, checked(d.index())); }
  Stream getStream(Device d) const override { return stream(indexed(d), current_stream[checked(d.index())]); }
  Stream getDefaultStream(Device d) const override { return stream(indexed(d), 0); }
  Stream getNewStream(Device d, int) const override { return stream(indexed(d), new_stream(checked(d.index()))); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override {
    return stream(s.device(), std::exchange(current_stream[s.device_index()], s.id()));
  }
  bool queryStream(const Stream& s) const override {
    check_failure();
    return queue_of(s).idle();
  }
  void synchronizeStream(const Stream& s) const override {
    host_waits("Stream.synchronize");
    queue_of(s).host_wait();
  }
  void synchronizeDevice(DeviceIndex d) const override {
    host_waits("synchronize");
    size_t streams;
    {
      auto& m = machine();
      std::lock_guard lock(machine_lock);
      streams = m.streams[d].size();
    }
    for (size_t id = 0; id < streams; ++id) queue_of(d, StreamId(id)).host_wait();
  }

  static SharedEvent& event(void* e) { return *static_cast<SharedEvent*>(e); }
  void record(void** e, const Stream& s, DeviceIndex, EventFlag) const override {
    if (!*e) {
      *e = new SharedEvent(std::make_shared<Event>());
      event(*e)->device = s.device_index();
    }
    TORCH_CHECK(event(*e)->device == s.device_index(), "simulated device: an event of another device");
    queue_of(s).record(event(*e));
  }
  void block(void* e, const Stream& s) const override {
    if (e) queue_of(s).wait_for(event(e));
  }
  bool queryEvent(void* e) const override {
    check_failure();
    return !e || event(e)->passed();
  }
  void synchronizeEvent(void* e) const override {
    if (!e) return;
    host_waits("Event.synchronize");
    event(e)->host_wait();
    check_failure();
  }
  void destroyEvent(void* e, DeviceIndex) const noexcept override { delete static_cast<SharedEvent*>(e); }
  double elapsedTime(void* first, void* last, DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(event(last)->passed_at() - event(first)->passed_at()).count();
  }
  void recordDataPtrOnStream(const DataPtr& data, const Stream& s) const override {
    device_memory.recordStream(data, s);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return the_machine != nullptr; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex d) const override { current_device = checked(d); }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return std::exchange(current_device, checked(d)); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Device getDeviceFromPtr(void* address) const override { return Device(KIND, on_engine(address).first); }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(DeviceIndex d) const override { return at::make_generator<Generator>(checked(d)); }
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override {
    DeviceGuard guard(storage.device());
    DataPtr data = device_memory.allocate(bytes);
    if (size_t kept = std::min(bytes, storage.nbytes())) device_memory.copy_data(data.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
};

// --- Tensors ---

using Sizes = IntArrayRef;

at::Tensor make(Sizes sizes, Sizes strides, ScalarType dtype, DeviceIndex d) {
  DeviceGuard guard(Device(KIND, d));
  return at::detail::empty_strided_generic(sizes, strides, &device_memory, KEYS, dtype);
}
at::Tensor empty(Sizes sizes, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
                 std::optional<bool>, std::optional<MemoryFormat> format) {
  DeviceGuard guard(device.value_or(Device(KIND)));
  return at::detail::empty_generic(sizes, &device_memory, KEYS, dtype_or_default(dtype), format);
}
at::Tensor empty_strided(Sizes sizes, Sizes strides, std::optional<ScalarType> dtype, std::optional<Layout>,
                         std::optional<Device> device, std::optional<bool>) {
  return make(sizes, strides, dtype_or_default(dtype), checked(device.value_or(Device(KIND)).index()));
}
const at::Tensor& resize_(const at::Tensor& self, Sizes sizes, std::optional<MemoryFormat> format) {
  size_t bytes = at::detail::computeStorageNbytesContiguous(sizes, self.element_size(), self.storage_offset());
  if (bytes > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  if (format && *format != MemoryFormat::Preserve) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}
at::Tensor& set_storage(at::Tensor& self, Storage storage, int64_t offset, Sizes sizes, Sizes strides) {
  TORCH_CHECK(storage.device() == self.device(), "simulated device: set_ to memory of ", storage.device());
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (strides.empty())
    self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  else
    self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return self;
}

// The same elements where streams see them. It keeps nothing alive.
at::Tensor engine_view(const at::Tensor& t) {
  TORCH_CHECK(t.layout() == kStrided, "simulated device: a tensor that is not strided");
  void* address = t.numel() ? on_engine(t.data_ptr()).second : nullptr;
  auto view = at::from_blob(address, t.sizes(), t.strides(), TensorOptions().dtype(t.scalar_type()));
  view._set_conj(t.is_conj());
  view._set_neg(t.is_neg());
  return view;
}

void push_copy(Queue& queue, at::Tensor to, at::Tensor from) {
  queue.push([to, from]() mutable { to.copy_(from); });
}

// Whether a copy moves one run of bytes. CUDA makes others by way of memory of the host that is not pinned.
bool one_run(const at::Tensor& from, const at::Tensor& to) {
  bool contiguous = from.is_contiguous() && to.is_contiguous();
  bool dense = from.strides() == to.strides() && from.is_non_overlapping_and_dense();
  return from.scalar_type() == to.scalar_type() && from.sizes() == to.sizes() && (contiguous || dense);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  check_failure();
  DeviceIndex source = from.device().index(), target = to.device().index();
  if (!to.numel()) return to;
  if (from.is_privateuseone() && to.is_privateuseone()) {
    auto &queue = current_queue(source), &other = current_queue(target);
    auto event = std::make_shared<Event>();
    // As CUDA: in the source's stream, behind both.
    if (&queue != &other) other.record(event), queue.wait_for(event);
    push_copy(queue, engine_view(to), engine_view(from));
    if (&queue != &other) queue.record(event), other.wait_for(event);
    return to;
  }
  auto& host = from.is_privateuseone() ? to : from;
  auto& queue = current_queue(from.is_privateuseone() ? source : target);
  bool out = from.is_privateuseone(), fit = is_pinned(host.data_ptr()) && one_run(from, to), late = non_blocking && fit;
  if (!late)
    host_waits(std::string(non_blocking ? "non_blocking copy " : "copy ") + (out ? "to " : "from ") +
               (fit ? "pinned memory" : "pageable memory, " + std::to_string(host.nbytes()) + " bytes"));
  if (out)
    push_copy(queue, to.detach(), engine_view(from));
  else  // torch, too, keeps pinned memory until a copy is through
    push_copy(queue, engine_view(to), from.detach());
  if (!late) queue.host_wait();
  return to;
}

// A kernel of a program's own (simulated.py): `words` are its arguments, and at `places` the tensors' addresses.
void launch_kernel(int64_t function, int64_t grid, int64_t block, std::vector<int64_t> words, at::TensorList tensors,
                   at::IntArrayRef places) {
  check_failure();
  for (size_t i = 0; i < tensors.size(); ++i)
    words[size_t(places[i])] = tensors[i].numel() ? int64_t(on_engine(tensors[i].data_ptr()).second) : 0;
  current_queue(tensors.at(0).device().index()).push([=]() mutable {
    std::vector<void*> args;
    for (auto& word : words) args.push_back(&word);
    reinterpret_cast<void (*)(unsigned, unsigned, void**)>(function)(unsigned(grid), unsigned(block), args.data());
  });
}

Scalar read_scalar(const at::Tensor& t) {
  host_waits("item");
  current_queue(t.device().index()).host_wait();
  return engine_view(t).item();
}

// The CPU's has no generator in its signature.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& x, double p, std::optional<bool> train) {
  auto mask = make(x.sizes(), x.strides(), kBool, x.device().index());
  if (!train.value_or(true)) return {x.clone(), mask.fill_(true)};
  mask.bernoulli_(1 - p);
  return {x.mul(mask).mul_(p < 1 ? 1 / (1 - p) : 0), mask};
}

// --- Kernels: every other operation ---

// What the results of an operation look like: tensors of the meta device, None, numbers; and arguments called `out`.
struct Form {
  std::vector<IValue> results;
  std::vector<std::pair<size_t, std::vector<int64_t>>> outs;
  bool known = true;  // false: the operation has no meta kernel
};

template <class F>
IValue map_tensors(const IValue& value, F&& f) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(f(value.toTensor())) : value;
  if (!value.isTensorList() && !value.isOptionalTensorList()) return value;
  auto list = value.toList();
  impl::GenericList mapped(list.elementType());
  for (size_t i = 0; i < list.size(); ++i) mapped.push_back(map_tensors(list.get(i), f));
  return mapped;
}

template <class F>
void for_tensors(const IValue& value, F&& f) {
  map_tensors(value, [&](const at::Tensor& t) {
    f(t);
    return t;
  });
}

at::Tensor meta_of(const at::Tensor& t) {
  if (!t.is_privateuseone()) return t;  // a number of the host's: its type counts less than a tensor's
  return at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type());
}

// Everything that a form depends on. False: something that it does not know.
bool describe(std::string& key, const IValue& value) {
  auto put = [&](auto x) { key.append(reinterpret_cast<const char*>(&x), sizeof x); };
  key += value.tagKind();
  if (value.isTensor()) {
    const auto& t = value.toTensor();
    if (!t.defined()) return true;
    put(t.scalar_type()), put(t.is_privateuseone()), put(t.dim());
    put(t.unsafeGetTensorImpl()->is_wrapped_number());
    for (auto size : t.sizes()) put(size);
    for (auto stride : t.strides()) put(stride);
  } else if (value.isDouble()) {
    put(value.toDouble());
  } else if (value.isInt()) {
    put(value.toInt());
  } else if (value.isBool()) {
    put(value.toBool());
  } else if (value.isString()) {
    put(value.toStringRef().size()), key += value.toStringRef();
  } else if (value.isList()) {
    put(value.toListRef().size());
    for (const IValue& element : value.toListRef())
      if (!describe(key, element)) return false;
  } else {
    return value.isNone() || value.isDevice() || value.isGenerator();
  }
  return true;
}

Form learn_form(const OperatorHandle& op, const Stack& args) {
  TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(DispatchKey::CPU),
                              "simulated device: the CPU has no kernel of ", op.operator_name());
  Form form;
  Stack stack;
  for (const IValue& value : args) {
    if (value.isDevice())
      stack.push_back(Device(kMeta));
    else
      stack.push_back(value.isGenerator() ? IValue() : map_tensors(value, meta_of));
  }
  Stack given = stack;
  try {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(&stack);
  } catch (const c10::NotImplementedError&) {
    form.known = false;
    return form;
  }
  form.results = std::move(stack);
  for (size_t i = 0; i < args.size(); ++i)
    if (op.schema().arguments()[i].is_out() && given[i].isTensor())
      form.outs.emplace_back(i, given[i].toTensor().sizes().vec());
  return form;
}

std::shared_ptr<const Form> form_of(const OperatorHandle& op, const Stack& args) {
  static std::mutex lock;
  static auto& cache = *new std::unordered_map<std::string, std::shared_ptr<const Form>>;
  std::string key = toString(op.operator_name()) + toString(get_default_dtype_as_scalartype());
  bool known = true;
  for (const IValue& value : args) known = known && describe(key, value);
  if (known) {
    std::lock_guard l(lock);
    if (auto found = cache.find(key); found != cache.end()) return found->second;
  }
  auto form = std::make_shared<const Form>(learn_form(op, args));
  std::lock_guard l(lock);
  if (known) cache[key] = form;
  return form;
}

// The argument that a result is, if it is one.
std::optional<size_t> written_argument(const FunctionSchema& schema, size_t result) {
  const auto* alias = schema.returns()[result].alias_info();
  if (!alias) return std::nullopt;
  TORCH_CHECK(alias->isWrite(), "simulated device: a view that it does not know: ", schema.operator_name());
  for (size_t i = 0; i < schema.arguments().size(); ++i)
    if (const auto* other = schema.arguments()[i].alias_info(); other && *other == *alias) return i;
  return std::nullopt;
}

// Whether the form of the results depends on what tensors hold, so that the host has to wait for them.
bool needs_values(const OperatorHandle& op, const Stack& args) {
  const auto& name = op.schema().name();
  if (name == "aten::index" || name == "aten::_index_put_impl_") {
    bool mask = false;
    for_tensors(args[1], [&](const at::Tensor& t) { mask |= t.scalar_type() == kBool || t.scalar_type() == kByte; });
    return mask;
  }
  return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
}

// The one device of the arguments, which are all there, but for numbers.
DeviceIndex device_of(const FunctionSchema& schema, const Stack& args) {
  DeviceIndex d = -1;
  for (const IValue& value : args)
    for_tensors(value, [&](const at::Tensor& t) {
      if (!t.is_privateuseone()) {
        bool number = t.is_cpu() && t.dim() == 0;
        TORCH_CHECK(number, "simulated device: ", schema.operator_name(), " of a tensor of ", t.device());
        return;
      }
      bool same = d < 0 || d == t.device().index();
      TORCH_CHECK(same, "simulated device: ", schema.operator_name(), " of tensors of two devices");
      d = t.device().index();
    });
  for (const IValue& value : args)
    if (d < 0 && value.isDevice()) d = value.toDevice().index();
  return checked(d);
}

// (a stream)
void compute(const OperatorHandle& op, Stack stack, const std::vector<IValue>& into) {
  op.callBoxed(&stack);
  auto store = [&](at::Tensor to, const at::Tensor& from) {
    if (!to.defined() || !from.defined() || !from.numel()) return;  // the CPU's leave out what nobody asks for
    TORCH_CHECK(to.sizes() == from.sizes() && to.dtype() == from.dtype(), op.operator_name(), " made ",
                from.toString(), from.sizes(), ", its meta kernel ", to.toString(), to.sizes());
    to.copy_(from);
  };
  for (size_t i = 0; i < into.size(); ++i) {
    if (into[i].isTensor()) store(into[i].toTensor(), stack[i].toTensor());
    if (!into[i].isTensorList()) continue;
    auto to = into[i].toTensorVector(), from = stack[i].toTensorVector();
    for (size_t k = 0; k < to.size(); ++k) store(to[k], from.at(k));
  }
}

void launch(const OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  check_failure();
  Stack args = torch::jit::pop(*stack, schema.arguments().size());
  if (schema.name() == "aten::index" || schema.name() == "aten::_index_put_impl_")  // as CUDA: copied to the device
    args[1] = map_tensors(args[1], [&](const at::Tensor& t) { return t.to(args[0].toTensor().device()); });
  DeviceIndex d = device_of(schema, args);
  DeviceGuard guard(Device(KIND, d));

  bool at_once = needs_values(op, args), drawn = !op.hasTag(at::Tag::nondeterministic_seeded);
  std::shared_ptr<const Form> form;
  if (!at_once) {
    form = form_of(op, args);
    for (auto& [i, sizes] : form->outs)
      if (args[i].toTensor().sizes() != Sizes(sizes)) resize_(args[i].toTensor(), sizes, std::nullopt);
  }
  Stack inner;  // what the kernel gets
  for (size_t i = 0; i < args.size(); ++i) {
    if (schema.arguments()[i].name() == "generator") {
      drawn = true;
      inner.push_back(draw(args[i], d));
    } else if (args[i].isDevice()) {
      inner.push_back(Device(kCPU));
    } else if (schema.arguments()[i].is_out() && args[i].isTensor()) {  // some kernels give theirs another form between
      inner.push_back(at::detail::empty_cpu({0}, args[i].toTensor().scalar_type()));
    } else {
      inner.push_back(map_tensors(args[i], [](const at::Tensor& t) {
        return t.is_privateuseone() ? engine_view(t) : t.clone();
      }));
    }
  }
  TORCH_CHECK(drawn, "simulated device: ", schema.operator_name(), " takes no generator");

  if (at_once) {
    host_waits(toString(schema.operator_name()));
    current_queue(d).host_wait();
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(&inner);
    for (size_t i = 0; i < schema.returns().size(); ++i) {
      auto argument = written_argument(schema, i);
      if (argument && schema.arguments()[*argument].is_out()) {
        resize_(args[*argument].toTensor(), inner[i].toTensor().sizes(), std::nullopt);
        push_copy(current_queue(d), engine_view(args[*argument].toTensor()), inner[i].toTensor());
      }
      stack->push_back(argument ? args[*argument] : map_tensors(inner[i], [&](const at::Tensor& t) {
        auto result = make(t.sizes(), t.strides(), t.scalar_type(), d);
        push_copy(current_queue(d), engine_view(result), t);
        return result;
      }));
    }
    return;
  }
  std::vector<IValue> into;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    if (auto argument = written_argument(schema, i)) {
      bool out = schema.arguments()[*argument].is_out();
      stack->push_back(args[*argument]);
      into.push_back(out ? map_tensors(args[*argument], engine_view) : IValue());
      continue;
    }
    TORCH_CHECK(form->known, "simulated device: no meta kernel of ", schema.operator_name());
    stack->push_back(map_tensors(form->results.at(i), [&](const at::Tensor& t) {
      return make(t.sizes(), t.strides(), t.scalar_type(), d);
    }));
    into.push_back(map_tensors(stack->back(), engine_view));
  }
  current_queue(d).push([op, inner = std::move(inner), into = std::move(into)] { compute(op, inner, into); });
}

// --- Autocast: the operations of torch's lists that a transformer has ---

template <bool lower>
void autocast(const OperatorHandle& op, Stack* stack) {
  impl::ExcludeDispatchKeyGuard once(DispatchKey::AutocastPrivateUse1);
  auto dtype = lower ? at::autocast::get_autocast_dtype(KIND) : kFloat;
  for (auto& value : torch::jit::last(*stack, op.schema().arguments().size()))
    const_cast<IValue&>(value) =
        map_tensors(value, [&](const at::Tensor& t) { return at::autocast::cached_cast(dtype, t, KIND); });
  op.callBoxed(stack);
}
constexpr const char* LOWER[] = {
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "addr", "conv1d", "conv2d", "conv3d",
    "prelu", "chain_matmul", "linalg_multi_dot", "scaled_dot_product_attention"};
constexpr const char* SINGLE[] = {
    "layer_norm", "group_norm", "rms_norm", "mse_loss", "l1_loss", "smooth_l1_loss", "nll_loss", "kl_div", "exp", "log",
    "cosine_similarity", "softmax.int", "log_softmax.int", "rsqrt", "softplus", "cumsum", "norm.Scalar", "dist",
    "pow.Tensor_Scalar", "pow.Tensor_Tensor"};

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("unfold", at::native::unfold);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", read_scalar);
  m.impl("native_dropout", native_dropout);
  // torch has formulas for these, and the CPU kernels of its own.
  for (auto name : {"native_layer_norm", "native_group_norm", "convolution", "convolution_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&launch>());
  m.impl("record_stream", [](at::Tensor& t, Stream s) { device_memory.recordStream(t.storage().data_ptr(), s); });
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&launch>()); }
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (auto name : LOWER) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<true>>());
  for (auto name : SINGLE) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<false>>());
}

// For simulated.py.
TORCH_LIBRARY(simulated, m) {
  static bool once = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);
  (void)once;
  m.def("initialized", [] { return the_machine != nullptr; });
  m.def("in_bad_fork", [] { return bad_fork; });
  m.def("default_generator", [](int64_t d) { return default_generator(DeviceIndex(d)); });
  m.def("pin", [](int64_t address, int64_t bytes) { pin((void*)address, size_t(bytes)); });
  m.def("unpin", [](int64_t address) { unpin((void*)address); });
  m.def("engine_view", engine_view);
  m.def("launch", launch_kernel);
  m.def("on_wait", [](int64_t function) { on_wait = reinterpret_cast<OnWait>(function); });
  m.def("set_patience", [](double seconds) { patience_s = seconds; });
  m.def("sleep", sleep_cycles);
  m.def("hold", hold);
  m.def("release", release);
}
