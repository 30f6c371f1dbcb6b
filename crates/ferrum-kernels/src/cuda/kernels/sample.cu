// Chooses a token from each row, a block for each.
//
// What is left in question is always the most likely tokens down to one of them. Mostly these are few: as many as a block has threads at
// most are listed and sorted, and all else is done with the list. Where they are more, nothing is sorted, and what is left is said by
// a bound: a key, and among tokens of that key an index. Bounds are found bit by bit, with a sum over the row for each bit.
// Branches with barriers in them depend on settings only, which are the same for all threads of a block.
#include "common.cuh"

#define MAX_THREADS 1024
#define TOGETHER 8u
// Words of settings and of a change, and what is told of a row.
#define SETTINGS 16
#define CHANGE 4
#define BESIDE 33
#define LOWEST 0xff800000u
#define LOWEST_KEY 0x00800000u
#define HIGHEST_KEY 0xff800000u

struct Best {
    uint32_t key;
    uint32_t index;
};

// What all threads of a block see; of each warp, where it has 32 elements.
struct Board {
    float scratch[32];
    uint32_t keys[32];
    uint32_t indices[32];
    uint32_t found;
    int last_is_listed;
    // The logit of the last token, where no change is listed for it; the token is -1 where one is.
    int last;
    uint32_t kept_last;
    // The most likely tokens, how many there are, and the key and the inverted index of each.
    uint32_t listed;
    uint64_t list[MAX_THREADS];
};

struct Row {
    uint32_t* logits;
    const uint32_t* work;
    Board* board;
    uint32_t vocab, mask_begin, mask_end;
    // Whether tokens outside the mask count as such.
    bool bent;
    uint32_t top_key;
    float temperature;
    // The last in question: its key, and the end of those of that key.
    uint32_t bound_key, bound_end;

    // Threads of the block.
    __device__ __forceinline__ uint32_t lanes() const { return blockDim.x; }
    __device__ __forceinline__ bool is_masked(uint32_t i) const {
        uint32_t word = mask_begin + i / 32;
        return bent && mask_end > mask_begin && (word >= mask_end || !(work[word] >> i % 32 & 1));
    }
    __device__ __forceinline__ uint32_t key_at(uint32_t i) const { return is_masked(i) ? LOWEST_KEY : key_of(logits[i]); }
    // Calls `each(key, index)` for the tokens of this thread in their order. Several are asked for at once, or a thread waits for
    // memory at each.
    template <class EACH>
    __device__ __forceinline__ void each_key(EACH each) const {
        for (uint32_t first = threadIdx.x; first < vocab; first += lanes() * TOGETHER) {
            uint32_t bits[TOGETHER];
#pragma unroll
            for (uint32_t j = 0; j < TOGETHER; j++)
                if (first + j * lanes() < vocab) bits[j] = logits[first + j * lanes()];
#pragma unroll
            for (uint32_t j = 0; j < TOGETHER; j++) {
                uint32_t i = first + j * lanes();
                if (i < vocab) each(is_masked(i) ? LOWEST_KEY : key_of(bits[j]), i);
            }
        }
    }
    __device__ __forceinline__ bool is_left(uint32_t key, uint32_t i) const {
        return key > bound_key || (key == bound_key && i < bound_end);
    }
};

__device__ __forceinline__ float float_of_key(uint32_t key) {
    return __uint_as_float(key >= 0x80000000u ? key - 0x80000000u : 0x80000000u | (0x80000000u - key));
}
__device__ __forceinline__ float weight(const Row& r, uint32_t key) {
    if (key == r.top_key) return 1.0f;
    if (key <= LOWEST_KEY || r.top_key >= HIGHEST_KEY) return 0.0f;
    return expf((float_of_key(key) - float_of_key(r.top_key)) / r.temperature);
}

// What is left with at least this key: together, and how many.
__device__ float mass_from(const Row& r, uint32_t least) {
    float sum = 0;
    r.each_key([&](uint32_t key, uint32_t i) {
        if (key >= least && r.is_left(key, i)) sum += weight(r, key);
    });
    return block_sum(sum, r.board->scratch);
}
__device__ float count_from(const Row& r, uint32_t least) {
    float count = 0;
    r.each_key([&](uint32_t key, uint32_t i) { count += key >= least && r.is_left(key, i) ? 1.0f : 0.0f; });
    return block_sum(count, r.board->scratch);
}

// The largest in the order of keys, of equals the lowest index, that comes after another in that order. `nans` becomes how many of
// this thread's are no numbers, and `own` the key of the best one of its others.
__device__ Best best_after(const Row& r, Best before, float& nans, uint32_t& own) {
    Best best = {0, 0};
    nans = 0;
    r.each_key([&](uint32_t key, uint32_t i) {
        nans += key == 0 ? 1.0f : 0.0f;
        bool after = key < before.key || (key == before.key && i > before.index);
        if (after && key > best.key) best = {key, i};
    });
    own = best.key;
#pragma unroll
    for (int flip = 16; flip > 0; flip /= 2) {
        uint32_t key = __shfl_xor_sync(ALL_LANES, best.key, flip), index = __shfl_xor_sync(ALL_LANES, best.index, flip);
        if (key > best.key || (key == best.key && index < best.index)) best = {key, index};
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) r.board->keys[threadIdx.x / 32] = best.key, r.board->indices[threadIdx.x / 32] = best.index;
    __syncthreads();
    for (uint32_t w = 0; w < r.lanes() / 32; w++) {
        uint32_t key = r.board->keys[w], index = r.board->indices[w];
        if (key > best.key || (key == best.key && index < best.index)) best = {key, index};
    }
    __syncthreads();
    return best;
}

// A thread's share of the row in the order of indices.
__device__ __forceinline__ uint32_t share_begin(const Row& r, uint32_t lane) {
    return min(lane * ((r.vocab + r.lanes() - 1) / r.lanes()), r.vocab);
}

// The exclusive prefix sum over the threads of a block, and the sum over `all`, in one order. `scratch` has 32 elements; behind
// this it may be used again.
template <class T>
__device__ __forceinline__ T exclusive_sum(T x, T* scratch, T& all) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    T sum = x;
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) {
        T other = __shfl_up_sync(ALL_LANES, sum, delta);
        if (lane >= delta) sum += other;
    }
    T inside = __shfl_up_sync(ALL_LANES, sum, 1), before = 0;
    if (lane == 31) scratch[warp] = sum;
    __syncthreads();
    all = 0;
    for (int w = 0; w < int(blockDim.x) / 32; w++) {
        T of_warp = scratch[w];
        if (w < warp) before += of_warp;
        all += of_warp;
    }
    __syncthreads();
    return lane == 0 ? before : before + inside;
}

// ---- the list of the most likely tokens ------------------------------------------------------------------------------------------

// Sorts the first `count` of the list, the largest first (bitonic sort; Batcher, 1968). All threads see it behind this.
__device__ void sort_list(const Row& r, uint32_t count) {
    uint64_t* list = r.board->list;
    uint32_t size = 2;
    while (size < count) size *= 2;
    // Each thread compares one pair, as there are no more than threads.
    if (threadIdx.x + count < size) list[threadIdx.x + count] = 0;
    for (uint32_t run = 2; run <= size; run *= 2) {
        for (uint32_t apart = run / 2; apart > 0; apart /= 2) {
            __syncthreads();
            uint32_t a = 2 * threadIdx.x - (threadIdx.x & (apart - 1)), b = a + apart;
            if (b >= size) continue;
            uint64_t first = list[a], second = list[b];
            if ((first < second) == !(a & run)) list[a] = second, list[b] = first;
        }
    }
    __syncthreads();
}
__device__ __forceinline__ uint32_t listed_key(const Row& r, uint32_t rank) { return uint32_t(r.board->list[rank] >> 32); }
__device__ __forceinline__ uint32_t listed_index(const Row& r, uint32_t rank) { return ~uint32_t(r.board->list[rank]); }

// Lists the most likely tokens in their order, `least` of them if there are so many, and others that may be as likely; false where these
// are more than threads. `own` is the key of this thread's best one: so many of these are at least as large as one of them, and
// hence as many tokens. Tokens of keys below `floor` are not listed.
__device__ bool list_best(const Row& r, uint32_t own, uint32_t least, uint32_t floor) {
    Board& board = *r.board;
    board.list[threadIdx.x] = uint64_t(own) << 32;
    __syncthreads();
    sort_list(r, r.lanes());
    uint32_t bound = max(listed_key(r, min(least, r.lanes()) - 1), floor);
    __syncthreads();
    if (threadIdx.x == 0) board.listed = 0;
    __syncthreads();
    r.each_key([&](uint32_t key, uint32_t i) {
        if (key < bound) return;
        uint32_t at = atomicAdd(&board.listed, 1u);
        if (at < r.lanes()) board.list[at] = uint64_t(key) << 32 | uint32_t(~i);
    });
    __syncthreads();
    if (board.listed > r.lanes()) return false;
    sort_list(r, board.listed);
    return true;
}

// The lowest thread for which it holds; the number of threads where there is none.
__device__ __forceinline__ uint32_t first_thread(const Row& r, bool holds) {
    float first = block_max(holds ? -float(threadIdx.x) : -float(r.lanes()), r.board->scratch);
    return uint32_t(-first);
}

// ---- bounds ------------------------------------------------------------------------------------------------------------------------

// The index of what is left of a key, number n of it from 1 on; the last if there are fewer.
__device__ uint32_t tie(const Row& r, uint32_t key, uint32_t n) {
    uint32_t lane = threadIdx.x, begin = share_begin(r, lane), end = share_begin(r, lane + 1), count = 0;
    for (uint32_t i = begin; i < end; i++) count += r.key_at(i) == key && r.is_left(key, i);
    if (lane == 0) r.board->found = 0;
    uint32_t all, before = exclusive_sum(count, r.board->keys, all);
    uint32_t wanted = min(max(n, 1u), all);
    if (before < wanted && wanted <= before + count) {
        uint32_t left = wanted - before;
        for (uint32_t i = begin; i < end && left > 0; i++)
            if (r.key_at(i) == key && r.is_left(key, i) && --left == 0) r.board->found = i;
    }
    __syncthreads();
    uint32_t found = r.board->found;
    __syncthreads();
    return found;
}

// How many tokens of a key it takes from a mass before them to more than another.
__device__ __forceinline__ uint32_t ties_for(const Row& r, uint32_t key, float missing) {
    return uint32_t(fminf(fmaxf(missing / fmaxf(weight(r, key), 1e-37f), 0.0f), 16777216.0f));
}

__device__ void cut_to_k(Row& r, uint32_t k) {
    uint32_t key = 0, above = 0;
    // At last what is above the key; one place for all sums, or the compiler writes each out.
    for (int bit = 0; bit <= 32; bit++) {
        uint32_t least = bit < 32 ? key | 0x80000000u >> bit : key + 1;
        float count = count_from(r, least);
        if (bit == 32) above = uint32_t(count);
        else if (count >= float(k)) key = least;
    }
    uint32_t end = tie(r, key, k - min(above, k)) + 1;
    r.bound_key = key;
    r.bound_end = end;
}

// Where the mass of the most likely tokens reaches a share of all: the key, and what is missing before those of that key. BEYOND: where
// it is more than that share.
struct Reached {
    uint32_t key;
    float missing;
};
template <bool BEYOND>
__device__ Reached reach(const Row& r, float share) {
    Reached found = {0, 0};
    float aim = 0;
    // At first all, and at last what is above the key.
    for (int bit = -1; bit <= 32; bit++) {
        uint32_t least = bit < 0 ? 0 : bit < 32 ? found.key | 0x80000000u >> bit : found.key + 1;
        float mass = mass_from(r, least);
        // Rounding must not leave anything over.
        if (bit < 0) aim = BEYOND ? fminf(share * mass, mass * 0.9999999f) : share * mass;
        else if (bit == 32) found.missing = aim - mass;
        else if (BEYOND ? mass > aim : mass >= aim && mass > 0) found.key = least;
    }
    return found;
}

__device__ void cut_to_p(Row& r, float share_of_all) {
    Reached found = reach<false>(r, share_of_all);
    uint32_t whole = ties_for(r, found.key, found.missing);
    uint32_t end = tie(r, found.key, whole + (float(whole) * weight(r, found.key) < found.missing ? 1 : 0)) + 1;
    r.bound_key = found.key;
    r.bound_end = end;
}

__device__ uint32_t draw_by_rank(const Row& r, float unit) {
    Reached found = reach<true>(r, unit);
    return tie(r, found.key, ties_for(r, found.key, found.missing) + 1);
}

__device__ uint32_t draw_by_index(const Row& r, float unit) {
    uint32_t lane = threadIdx.x, begin = share_begin(r, lane), end = share_begin(r, lane + 1);
    float sum = 0;
    for (uint32_t i = begin; i < end; i++) {
        uint32_t key = r.key_at(i);
        sum += r.is_left(key, i) ? weight(r, key) : 0.0f;
    }
    if (lane == 0) r.board->found = 0;
    float all, before = exclusive_sum(sum, r.board->scratch, all), left = unit * all;
    // The last share that is reached and has anything.
    float chosen = block_max(sum > 0 && before <= left ? float(lane) : -1.0f, r.board->scratch);
    if (float(lane) == chosen) {
        left -= before;
        for (uint32_t i = begin; i < end; i++) {
            uint32_t key = r.key_at(i);
            float w = r.is_left(key, i) ? weight(r, key) : 0.0f;
            if (w > 0) {
                r.board->found = i;
                left -= w;
                if (left < 0) break;
            }
        }
    }
    __syncthreads();
    uint32_t found = r.board->found;
    __syncthreads();
    return found;
}

// Of a key, when the best one is `top` and all weights together are `sum`.
__device__ __forceinline__ float logprob(uint32_t key, uint32_t top, float sum) {
    if (key == top) return -logf(sum);
    if (key <= LOWEST_KEY || top >= HIGHEST_KEY) return __uint_as_float(LOWEST);
    return float_of_key(key) - float_of_key(top) - logf(sum);
}

// A logit after bias and penalties. What is no finite number stays what it is.
__device__ __forceinline__ uint32_t changed(const uint32_t* want, uint32_t bits, uint32_t bias, bool recent,
                                            uint32_t generated) {
    if (bias == LOWEST) return LOWEST;
    uint32_t key = key_of(bits);
    if (key <= LOWEST_KEY || key >= HIGHEST_KEY) return bits;
    float x = __uint_as_float(bits) + __uint_as_float(bias);
    float penalty = __uint_as_float(want[4]);
    if (recent) x = x > 0 ? x / penalty : x * penalty;
    if (generated > 0) x -= __uint_as_float(want[5]) + __uint_as_float(want[6]) * float(generated);
    return __float_as_uint(x);
}

// What the model said, before anything is changed: its best key and the sum of weights, and the most likely tokens.
__device__ Best tell_top(Row& r, uint32_t wanted, int* ranks, float* logprobs, float& sum) {
    float nans;
    uint32_t own, none_own;
    Best none = {0xffffffffu, 0}, top = best_after(r, none, nans, own), best = none;
    r.top_key = top.key;
    float temperature = r.temperature;
    r.temperature = 1;
    sum = mass_from(r, 0);
    r.temperature = temperature;
    // What is no number has key 0.
    bool is_listed = wanted > 1 && list_best(r, own, wanted - 1, 1);
    if (is_listed) {
        for (uint32_t n = 1 + threadIdx.x; n < wanted; n += r.lanes()) {
            bool there = n <= r.board->listed;
            ranks[n] = there ? int(listed_index(r, n - 1)) : -1;
            logprobs[n] = logprob(there ? listed_key(r, n - 1) : 0, top.key, sum);
        }
    }
    for (uint32_t n = 1; n < wanted && !is_listed; n++) {
        best = best_after(r, best, nans, none_own);
        if (threadIdx.x == 0) {
            ranks[n] = best.key == 0 ? -1 : int(best.index);
            logprobs[n] = logprob(best.key, top.key, sum);
        }
    }
    for (uint32_t n = wanted + threadIdx.x; n < BESIDE; n += r.lanes()) ranks[n] = -1;
    return top;
}

// How the token of a row is drawn; settings stay in shared memory.
struct Draw {
    const uint32_t* want;
    bool by_k, by_p;
    // Keys below it are left out by min-p.
    uint32_t least_key;

    __device__ __forceinline__ uint32_t k() const { return want[1]; }
    __device__ __forceinline__ float share() const { return __uint_as_float(want[2]); }
    __device__ __forceinline__ float unit() const { return __uint_as_float(want[7]); }
};

// Draws from the list; false where it does not reach the share of top-p. Without top-k, `all_mass` is the mass of all tokens.
__device__ bool draw_from_list(const Row& r, const Draw& draw, float all_mass, uint32_t& token) {
    float* scratch = r.board->scratch;
    uint32_t rank = threadIdx.x, left = r.board->listed;
    if (draw.by_k) left = min(left, draw.k());
    uint32_t key = rank < left ? listed_key(r, rank) : 0;
    float w = rank < left ? weight(r, key) : 0.0f, listed, all, before = exclusive_sum(w, scratch, listed);
    if (draw.by_p) {
        float enough = draw.share() * (draw.by_k ? listed : all_mass);
        if (!draw.by_k && listed < enough) return false;
        left = min(left, first_thread(r, rank > 0 && before >= enough));
    }
    left = min(left, first_thread(r, key < draw.least_key));
    if (rank >= left) w = 0;
    before = exclusive_sum(w, scratch, all);
    // Rounding must not leave anything over.
    float aim = fminf(draw.unit() * all, all * 0.9999999f);
    uint32_t chosen = first_thread(r, w > 0 && before + w > aim);
    float last = block_max(w > 0 ? float(rank) : 0.0f, scratch);
    token = listed_index(r, min(chosen, uint32_t(last)));
    return true;
}

// The token of what is left after top-k, top-p and min-p. `own` is the key of this thread's best one.
__device__ uint32_t draw(Row& r, const uint32_t* want, uint32_t own) {
    Draw draw = {want, want[1] > 0 && want[1] < r.vocab, (want[14] & 1) != 0, 0};
    if ((want[14] & 2) && r.top_key > LOWEST_KEY && r.top_key < HIGHEST_KEY) {
        // The logarithm is the host's.
        float least = float_of_key(r.top_key) + r.temperature * __uint_as_float(want[3]);
        draw.least_key = min(key_of(__float_as_uint(least)), r.top_key);
    }
    bool by_rank = draw.by_k || draw.by_p;
    // Of 1024 threads, 512 have about 710 tokens as likely as that, and 640 have 1004: more have no room.
    bool whole = r.vocab <= r.lanes();
    uint32_t least = draw.by_k ? draw.k() : whole ? r.lanes() : r.lanes() / 2, token;
    if (by_rank && least <= (whole ? r.lanes() : r.lanes() * 5 / 8)) {
        float all_mass = draw.by_k ? 0 : mass_from(r, 0);
        // What is impossible weighs nothing, and may be nearly all.
        if (list_best(r, own, least, LOWEST_KEY + 1) && draw_from_list(r, draw, all_mass, token)) return token;
    }
    if (draw.by_k) cut_to_k(r, draw.k());
    if (draw.by_p) cut_to_p(r, draw.share());
    if (draw.least_key > r.bound_key) r.bound_key = draw.least_key, r.bound_end = r.vocab;
    return by_rank ? draw_by_rank(r, draw.unit()) : draw_by_index(r, draw.unit());
}

KERNEL __launch_bounds__(MAX_THREADS, 1) sample(uint32_t* all_logits, uint32_t* work, const int* previous, int* tokens, int* all_ranks,
                                       float* all_logprobs, int vocab, int first) {
    __shared__ Board board;
    __shared__ uint32_t want[SETTINGS];
    wait_for_previous();
    uint32_t lane = threadIdx.x, lanes = blockDim.x;
    if (lane < SETTINGS) want[lane] = work[int64_t(blockIdx.x) * SETTINGS + lane];
    if (lane == 0) board.last_is_listed = 0;
    __syncthreads();
    int64_t out = int64_t(first) + blockIdx.x;
    uint32_t* logits = all_logits + out * vocab;
    int* ranks = all_ranks + out * BESIDE;
    float* logprobs = all_logprobs + out * BESIDE;
    Row r = {logits, work, &board, uint32_t(vocab), want[12], want[13], false, 0, __uint_as_float(want[0]), 0,
             uint32_t(vocab)};
    float raw_sum = 0;
    Best raw = {0, 0};
    if (want[9] > 0) raw = tell_top(r, want[9], ranks, logprobs, raw_sum);

    // Biases and penalties, and what was there before them.
    int last = want[8] > 0 ? previous[want[8] - 1] : -1;
    if (last >= vocab) last = -1;
    for (uint32_t c = want[10] + lane * CHANGE; c < want[11]; c += lanes * CHANGE) {
        uint32_t token = work[c], kept = logits[token];
        bool once_more = int(token) == last;
        if (once_more) board.last_is_listed = 1;
        bool recent = (work[c + 2] & 1) || once_more;
        logits[token] = changed(want, kept, work[c + 1], recent, (work[c + 2] >> 1) + (once_more ? 1 : 0));
        work[c + 3] = kept;
    }
    __syncthreads();
    if (lane == 0) {
        board.last = board.last_is_listed ? -1 : last;
        if (board.last >= 0) {
            board.kept_last = logits[last];
            logits[last] = changed(want, board.kept_last, 0, true, 1);
        }
    }
    __syncthreads();
    r.bent = true;
    float nans;
    uint32_t own;
    Best none = {0xffffffffu, 0}, best = best_after(r, none, nans, own);
    r.top_key = best.key;
    nans = block_sum(nans, board.scratch);
    uint32_t token = want[0] != 0 && best.key > LOWEST_KEY ? draw(r, want, own) : best.index;

    // The row as it was.
    __syncthreads();
    for (uint32_t c = want[10] + lane * CHANGE; c < want[11]; c += lanes * CHANGE) logits[work[c]] = work[c + 3];
    if (lane == 0 && board.last >= 0) logits[board.last] = board.kept_last;
    __syncthreads();
    r.bent = false;
    if (want[9] > 0) {
        uint32_t key = key_of(logits[token]);
        float above = 0;
        for (uint32_t i = lane; i < r.vocab; i += lanes) {
            uint32_t other = key_of(logits[i]);
            above += other > key || (other == key && i < token) ? 1.0f : 0.0f;
        }
        above = block_sum(above, board.scratch);
        if (lane == 0) {
            ranks[0] = int(above) + 1;
            logprobs[0] = logprob(key, raw.key, raw_sum);
        }
    }
    if (lane == 0) tokens[out] = best.key <= LOWEST_KEY ? (nans > 0 ? -1 : -2) : int(token);
}
