// The trainer's side of the ring (log/ring.py draws it): a thread that copies tensors into it without the GIL.
//
// One caller at a time pushes. A push reserves the place and writes the record's header there. A small body is
// copied by the caller; a larger one becomes a job of the copier, which takes jobs in order, a piece at a time. A
// caller who waits takes pieces too: the copier may be on a core where others compute, and the caller would wait for
// those. The head is stored after everything below it was written, so the other process sees a record whole or not at
// all. A job never waits for anything: its place was free when it was reserved. Except one whose body somebody else
// writes (a device): it is published, and all behind it, once its end is said to be complete; never, if that is not said.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace {

constexpr uint64_t kControl = 64 << 10;  // the control area's size
constexpr uint64_t kHead = 64, kTail = 128, kWakeAt = 192;  // offsets in the control area
constexpr uint64_t kHeader = 128, kAlign = 64, kPadding = 2;
constexpr uint64_t kSmall = 64 << 10;       // copied by the caller: waking a thread costs as much
constexpr uint64_t kPiece = 128 << 10;      // of a body, for one thread: some 20 us
constexpr uint64_t kPopulate = 4 << 20;     // pages that are made ready at a time

using Word = std::atomic<uint64_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == 8, "a word of shared memory");

struct Job {
    const char *source;
    char *to;
    uint64_t size, end;
    bool elsewhere = false;  // somebody else writes the body
    uint64_t taken = 0, copied = 0;
};

struct Ring {
    char *control, *data;
    uint64_t capacity;
    int wake;
    uint64_t reserved, completed, populated = 0;
    bool stop = false;
    std::mutex mutex;
    std::condition_variable work, done;
    std::deque<Job> jobs;
    std::thread copier;

    Word &word(uint64_t offset) { return *reinterpret_cast<Word *>(control + offset); }

    void publish(uint64_t end) {
        word(kHead).store(end, std::memory_order_release);
        // The consumer says when to be woken, then looks at the head once more: one of the two sees the other.
        std::atomic_thread_fence(std::memory_order_seq_cst);
        const uint64_t at = word(kWakeAt).load(std::memory_order_relaxed);
        if (at && at <= end && word(kWakeAt).exchange(0)) {
            const uint64_t one = 1;
            while (write(wake, &one, sizeof one) < 0 && errno == EINTR) {
            }
        }
    }

    void enqueue(const Job &job) {
        std::lock_guard<std::mutex> lock(mutex);
        jobs.push_back(job);
        reserved = job.end;
        finish();
        if (job.size) work.notify_one();
    }

    // Publishes what is whole, in order.
    void finish() {
        uint64_t end = 0;
        for (; !jobs.empty(); jobs.pop_front()) {
            const Job &job = jobs.front();
            if (job.elsewhere ? completed < job.end : job.copied < job.size) break;
            end = job.end;
        }
        if (!end) return;
        publish(end);
        done.notify_all();
    }

    // The first job of which nobody has taken all.
    Job *next() {
        for (Job &job : jobs)
            if (job.taken < job.size) return &job;
        return nullptr;
    }

    // A job stays where it is until all of it is copied, whatever others add and finish meanwhile.
    void copy_piece(Job &job, std::unique_lock<std::mutex> &lock) {
        const uint64_t at = job.taken, size = std::min(kPiece, job.size - at);
        job.taken += size;
        lock.unlock();
        std::memcpy(job.to + at, job.source + at, size);
        lock.lock();
        job.copied += size;
        finish();
    }

    void run() {
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            if (Job *job = next()) {
                copy_piece(*job, lock);
            } else if (stop) {
                return;
            } else if (populated >= capacity) {
                work.wait(lock);
            } else {
                const uint64_t size = std::min(kPopulate, capacity - populated);
                lock.unlock();
                // Where the kernel cannot, the first round of the ring takes the faults.
                const bool able = madvise(data + populated, size, MADV_POPULATE_WRITE) == 0;
                lock.lock();
                populated = able ? populated + size : capacity;
            }
        }
    }
};

}  // namespace

extern "C" {

const char *swift_ring_source() { return SWIFT_SOURCE; }

// A mapping of its own: the copier must not depend on when the caller's goes away. Null if there is no memory, or no
// thread.
void *swift_ring_open(int fd, uint64_t capacity, int wake) {
    void *mapped = mmap(nullptr, kControl + capacity, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED) return nullptr;
    Ring *ring = new Ring;
    ring->control = static_cast<char *>(mapped);
    ring->data = ring->control + kControl;
    ring->capacity = capacity;
    ring->wake = wake;
    ring->reserved = ring->completed = ring->word(kHead).load();
    try {
        ring->copier = std::thread(&Ring::run, ring);
    } catch (const std::system_error &) {
        munmap(mapped, kControl + capacity);
        delete ring;
        return nullptr;
    }
    return ring;
}

// The position behind the record; -1 if there is no room now. `now`: the source may change after the call. Without a
// source the body's place is left to whoever writes it there and says `swift_ring_complete`.
int64_t swift_ring_push(void *handle, const char *header, const char *source, uint64_t size, int now) {
    Ring &ring = *static_cast<Ring *>(handle);
    const uint64_t total = (kHeader + size + kAlign - 1) / kAlign * kAlign;
    const uint64_t tail = ring.word(kTail).load(std::memory_order_acquire);
    uint64_t offset = ring.reserved % ring.capacity;
    if (offset + total > ring.capacity) {  // a record is never torn in two: the rest of this round is padding
        const uint64_t rest = ring.capacity - offset;
        if (ring.reserved + rest - tail > ring.capacity) return -1;
        const uint64_t padding[2] = {rest, kPadding};
        std::memcpy(ring.data + offset, padding, sizeof padding);
        ring.enqueue({nullptr, nullptr, 0, ring.reserved + rest});
        offset = 0;
    }
    const uint64_t end = ring.reserved + total;
    if (end - tail > ring.capacity) return -1;
    char *place = ring.data + offset;
    std::memcpy(place, header, kHeader);
    if (source == nullptr && size) {
        ring.enqueue({nullptr, nullptr, 0, end, true});
    } else if (now || size <= kSmall) {
        std::memcpy(place + kHeader, source, size);
        ring.enqueue({nullptr, nullptr, 0, end});
    } else {
        ring.enqueue({source, place + kHeader, size, end});
    }
    return static_cast<int64_t>(end);
}

// All bodies below the position that are written elsewhere are there.
void swift_ring_complete(void *handle, uint64_t position) {
    Ring &ring = *static_cast<Ring *>(handle);
    std::lock_guard<std::mutex> lock(ring.mutex);
    ring.completed = std::max(ring.completed, position);
    ring.finish();
}

// Returns when everything below the position is published.
void swift_ring_wait(void *handle, uint64_t position) {
    Ring &ring = *static_cast<Ring *>(handle);
    std::unique_lock<std::mutex> lock(ring.mutex);
    while (ring.word(kHead).load(std::memory_order_relaxed) < position) {
        if (Job *job = ring.next())
            ring.copy_piece(*job, lock);
        else
            ring.done.wait(lock);
    }
}

// Finishes what was pushed, up to the first body that is not complete.
void swift_ring_close(void *handle) {
    Ring *ring = static_cast<Ring *>(handle);
    {
        std::lock_guard<std::mutex> lock(ring->mutex);
        ring->stop = true;
    }
    ring->work.notify_one();
    ring->copier.join();
    munmap(ring->control, kControl + ring->capacity);
    delete ring;
}

uint64_t swift_ring_load(const char *at) {
    return reinterpret_cast<const Word *>(at)->load(std::memory_order_acquire);
}

void swift_ring_store(char *at, uint64_t value) {
    reinterpret_cast<Word *>(at)->store(value, std::memory_order_seq_cst);
}

}  // extern "C"
