// Chooses a token from each row, a workgroup for each.
//
// What is left in question is always the most likely tokens down to one of them. Mostly these are few: up to LIST are listed and
// sorted, and all else is done with the list. Where they are more, nothing is sorted, and what is left is said by a bound: a key, and
// among tokens of that key an index. Bounds are found bit by bit, with a sum over the row for each bit. Branches with barriers in them
// depend on what is the same for all lanes, and is loaded so that the compiler knows it.

struct Params {
    rows: u32,
    vocab: u32,
    first: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(1) @binding(0) var<storage, read_write> logits: array<u32>;
// Settings of all rows, then changes, then masks, as `SampleBatch::write_words` has them.
@group(1) @binding(1) var<storage, read_write> work: array<u32>;
@group(1) @binding(2) var<storage, read> previous: array<i32>;
@group(1) @binding(3) var<storage, read_write> tokens: array<i32>;
@group(1) @binding(4) var<storage, read_write> ranks: array<i32>;
@group(1) @binding(5) var<storage, read_write> logprobs: array<f32>;

// Words of settings and of a change.
const SETTINGS = 16u;
const CHANGE = 4u;
const BESIDE = 33u;
const LOWEST = 0xff800000u;
const LOWEST_KEY = 0x00800000u;
const HIGHEST_KEY = 0xff800000u;
// Most tokens of the list, and parts of a row whose best ones say what goes there.
const LIST = 1024u;
const PARTS = 256u;

var<workgroup> settings: array<u32, SETTINGS>;
var<workgroup> keys: array<u32, LANES>;
var<workgroup> indices: array<u32, LANES>;
// What one lane found for all.
var<workgroup> found: vec2<u32>;
var<workgroup> last_is_listed: atomic<u32>;
// The most likely tokens: the key and the index of each, their weights, and how many there are.
var<workgroup> list: array<vec2<u32>, LIST>;
var<workgroup> weights: array<f32, LIST>;
var<workgroup> listed: atomic<u32>;

// Where the row begins, and where its mask does and ends.
var<private> base: u32;
var<private> mask: vec2<u32>;
// Whether tokens outside the mask and changed ones count as such.
var<private> bent: bool;
var<private> top_key: u32;
var<private> temperature: f32;
// The last in question: its key, and the end of those of that key.
var<private> bound_key: u32;
var<private> bound_end: u32;

fn key_at(i: u32) -> u32 {
    let word = mask.x + i / 32u;
    let masked = bent && mask.y > mask.x;
    if masked && (word >= mask.y || (work[min(word, mask.y)] >> (i % 32u) & 1u) == 0u) {
        return LOWEST_KEY;
    }
    return key_of(logits[base + i]);
}

fn bits_of(key: u32) -> u32 {
    if key >= 0x80000000u {
        return key - 0x80000000u;
    }
    return 0x80000000u | (0x80000000u - key);
}

fn weight(key: u32) -> f32 {
    if key == top_key {
        return 1.0;
    }
    if key <= LOWEST_KEY || top_key >= HIGHEST_KEY {
        return 0.0;
    }
    return exp((bitcast<f32>(bits_of(key)) - bitcast<f32>(bits_of(top_key))) / temperature);
}

fn is_left(key: u32, i: u32) -> bool {
    return key > bound_key || (key == bound_key && i < bound_end);
}

// What is left with at least this key: together, and how many.
fn mass_from(lane: u32, least: u32) -> f32 {
    var sum = 0.0;
    for (var i = lane; i < p.vocab; i += LANES) {
        let key = key_at(i);
        if key >= least && is_left(key, i) {
            sum += weight(key);
        }
    }
    return lane_sum(lane, sum);
}

fn count_from(lane: u32, least: u32) -> f32 {
    var count = 0.0;
    for (var i = lane; i < p.vocab; i += LANES) {
        let key = key_at(i);
        count += f32(key >= least && is_left(key, i));
    }
    return lane_sum(lane, count);
}

// The largest in the order of keys, of equals the lowest index, that comes after another in that order.
fn best_after(lane: u32, key_before: u32, index_before: u32) -> vec2<u32> {
    var best = vec2<u32>(0u, 0u);
    for (var i = lane; i < p.vocab; i += LANES) {
        let key = key_at(i);
        let after = key < key_before || (key == key_before && i > index_before);
        if after && key > best.x {
            best = vec2<u32>(key, i);
        }
    }
    workgroupBarrier();
    keys[lane] = best.x;
    indices[lane] = best.y;
    workgroupBarrier();
    for (var l = 0u; l < LANES; l++) {
        let other = vec2<u32>(keys[l], indices[l]);
        if other.x > best.x || (other.x == best.x && other.y < best.y) {
            best = other;
        }
    }
    return best;
}

fn is_before(a: vec2<u32>, b: vec2<u32>) -> bool {
    return a.x > b.x || (a.x == b.x && a.y < b.y);
}

// Sorts the first `count` of the list, the most likely first (bitonic sort; Batcher, 1968).
fn sort_list(lane: u32, count: u32) {
    var size = 2u;
    while size < count {
        size *= 2u;
    }
    for (var i = count + lane; i < size; i += LANES) {
        list[i] = vec2<u32>(0u, 0xffffffffu);
    }
    for (var run = 2u; run <= size; run *= 2u) {
        for (var apart = run / 2u; apart > 0u; apart /= 2u) {
            workgroupBarrier();
            for (var pair = lane; pair < size / 2u; pair += LANES) {
                let a = 2u * pair - (pair & (apart - 1u));
                let first = list[a];
                let second = list[a + apart];
                if is_before(second, first) == ((a & run) == 0u) {
                    list[a] = second;
                    list[a + apart] = first;
                }
            }
        }
    }
    workgroupBarrier();
}

// Lists the most likely tokens in their order, `least` of them if there are so many, and others that may be as likely; gives how many, more
// than LIST where there is no room for all, and no list. So many of the best tokens of parts are at least as large as one of them,
// and hence as many tokens. Tokens of keys below `least_key` are not listed.
fn list_best(lane: u32, least: u32, least_key: u32) -> u32 {
    workgroupBarrier();
    for (var part = lane; part < PARTS; part += LANES) {
        var most = 0u;
        for (var i = part; i < p.vocab; i += PARTS) {
            most = max(most, key_at(i));
        }
        list[part] = vec2<u32>(most, part);
    }
    sort_list(lane, PARTS);
    if lane == 0u {
        atomicStore(&listed, 0u);
        found.y = max(list[min(least, PARTS) - 1u].x, least_key);
    }
    let bound = workgroupUniformLoad(&found).y;
    for (var i = lane; i < p.vocab; i += LANES) {
        let key = key_at(i);
        if key >= bound {
            let place = atomicAdd(&listed, 1u);
            if place < LIST {
                list[place] = vec2<u32>(key, i);
            }
        }
    }
    workgroupBarrier();
    if lane == 0u {
        found.y = atomicLoad(&listed);
    }
    let count = workgroupUniformLoad(&found).y;
    if count <= LIST {
        sort_list(lane, count);
    }
    return count;
}

// A lane's share of the row in the order of indices.
fn share(lane: u32) -> vec2<u32> {
    let len = (p.vocab + LANES - 1u) / LANES;
    return min(vec2<u32>(lane, lane + 1u) * len, vec2<u32>(p.vocab));
}

// The index of what is left of a key, number n of it from 1 on; the last if there are fewer.
fn tie(lane: u32, key: u32, n: u32) -> u32 {
    let range = share(lane);
    var count = 0u;
    for (var i = range.x; i < range.y; i++) {
        count += u32(key_at(i) == key && is_left(key, i));
    }
    workgroupBarrier();
    keys[lane] = count;
    workgroupBarrier();
    var before = 0u;
    var all = 0u;
    for (var l = 0u; l < LANES; l++) {
        before += select(0u, keys[l], l < lane);
        all += keys[l];
    }
    let wanted = min(max(n, 1u), all);
    if before < wanted && wanted <= before + count {
        var left = wanted - before;
        for (var i = range.x; i < range.y; i++) {
            left -= u32(key_at(i) == key && is_left(key, i));
            if left == 0u {
                found.x = i;
                break;
            }
        }
    }
    workgroupBarrier();
    return found.x;
}

// How many tokens of a key it takes from a mass before them to more than another.
fn ties_for(key: u32, missing: f32) -> u32 {
    return u32(clamp(missing / max(weight(key), 1e-37), 0.0, 16777216.0));
}

fn cut_to_k(lane: u32, k: u32) {
    var key = 0u;
    for (var bit = 0u; bit < 32u; bit++) {
        let higher = key | (0x80000000u >> bit);
        if count_from(lane, higher) >= f32(k) {
            key = higher;
        }
    }
    let above = u32(count_from(lane, key + 1u));
    let end = tie(lane, key, k - min(above, k)) + 1u;
    bound_key = key;
    bound_end = end;
}

fn cut_to_p(lane: u32, share_of_all: f32) {
    let enough = share_of_all * mass_from(lane, 0u);
    var key = 0u;
    for (var bit = 0u; bit < 32u; bit++) {
        let higher = key | (0x80000000u >> bit);
        let mass = mass_from(lane, higher);
        if mass >= enough && mass > 0.0 {
            key = higher;
        }
    }
    let missing = enough - mass_from(lane, key + 1u);
    let whole = ties_for(key, missing);
    let n = whole + u32(f32(whole) * weight(key) < missing);
    let end = tie(lane, key, n) + 1u;
    bound_key = key;
    bound_end = end;
}

fn draw_by_rank(lane: u32, unit: f32) -> u32 {
    let all = mass_from(lane, 0u);
    // Rounding must not leave anything over.
    let aim = min(unit * all, all * 0.9999999);
    var key = 0u;
    for (var bit = 0u; bit < 32u; bit++) {
        let higher = key | (0x80000000u >> bit);
        if mass_from(lane, higher) > aim {
            key = higher;
        }
    }
    let missing = aim - mass_from(lane, key + 1u);
    return tie(lane, key, ties_for(key, missing) + 1u);
}

fn draw_by_index(lane: u32, unit: f32) -> u32 {
    let range = share(lane);
    var sum = 0.0;
    for (var i = range.x; i < range.y; i++) {
        let key = key_at(i);
        sum += select(0.0, weight(key), is_left(key, i));
    }
    let all = lane_sum(lane, sum);
    var left = unit * all;
    // The last share that is reached and has anything.
    var chosen = 0u;
    var start = 0.0;
    var before = 0.0;
    for (var l = 0u; l < LANES; l++) {
        if lane_values[l] > 0.0 && before <= left {
            chosen = l;
            start = before;
        }
        before += lane_values[l];
    }
    if lane == chosen {
        left -= start;
        for (var i = range.x; i < range.y; i++) {
            let key = key_at(i);
            let w = select(0.0, weight(key), is_left(key, i));
            if w > 0.0 {
                found.x = i;
                left -= w;
                if left < 0.0 {
                    break;
                }
            }
        }
    }
    workgroupBarrier();
    return found.x;
}

// How the token of a row is drawn: `k` is 0 without top-k, `share` negative without top-p, and keys below `least_key` are left out by
// min-p.
struct Draw {
    k: u32,
    share: f32,
    least_key: u32,
    unit: f32,
}

// Draws from a list of `count` tokens: the token, and 0 where the list does not reach the share of top-p. Without top-k, `all_mass` is the
// mass of all tokens.
fn draw_from_list(lane: u32, count: u32, draw: Draw, all_mass: f32) -> vec2<u32> {
    let left = select(count, min(count, draw.k), draw.k > 0u);
    for (var i = lane; i < left; i += LANES) {
        weights[i] = weight(list[i].x);
    }
    workgroupBarrier();
    if lane == 0u {
        var all = all_mass;
        if draw.k > 0u {
            all = 0.0;
            for (var i = 0u; i < left; i++) {
                all += weights[i];
            }
        }
        let enough = draw.share * all;
        var mass = 0.0;
        var end = 0u;
        while end < left && list[end].x >= draw.least_key {
            if end > 0u && draw.share >= 0.0 && mass >= enough {
                break;
            }
            mass += weights[end];
            end++;
        }
        let reaches = draw.k > 0u || end < left || mass >= enough;
        // Rounding must not leave anything over.
        let aim = min(draw.unit * mass, mass * 0.9999999);
        var sum = 0.0;
        var chosen = 0u;
        for (var i = 0u; i < end && sum <= aim; i++) {
            if weights[i] > 0.0 {
                chosen = i;
                sum += weights[i];
            }
        }
        // Of an empty list, which only a row of nothing possible has, nothing is a token.
        found = vec2<u32>(min(list[chosen].y, p.vocab - 1u), u32(reaches));
    }
    return workgroupUniformLoad(&found);
}

// Of a key, when the best one is `top` and all weights together are `sum`.
fn logprob(key: u32, top: u32, sum: f32) -> f32 {
    if key == top {
        return -log(sum);
    }
    if key <= LOWEST_KEY || top >= HIGHEST_KEY {
        return bitcast<f32>(LOWEST);
    }
    return bitcast<f32>(bits_of(key)) - bitcast<f32>(bits_of(top)) - log(sum);
}

// A logit after bias and penalties. What is no finite number stays what it is.
fn changed(bits: u32, bias: u32, recent: bool, generated: u32) -> u32 {
    if bias == LOWEST {
        return LOWEST;
    }
    let key = key_of(bits);
    if key <= LOWEST_KEY || key >= HIGHEST_KEY {
        return bits;
    }
    var x = bitcast<f32>(bits) + bitcast<f32>(bias);
    if recent {
        let penalty = bitcast<f32>(settings[4]);
        x = select(x * penalty, x / penalty, x > 0.0);
    }
    if generated > 0u {
        x -= bitcast<f32>(settings[5]) + bitcast<f32>(settings[6]) * f32(generated);
    }
    return bitcast<u32>(x);
}

@compute @workgroup_size(LANES)
fn main(at: Place) {
    let row = group_of(at);
    if row >= p.rows {
        return;
    }
    let lane = at.lane;
    if lane < SETTINGS {
        settings[lane] = work[row * SETTINGS + lane];
    }
    if lane == 0u {
        atomicStore(&last_is_listed, 0u);
        found = vec2<u32>(0u, 0u);
    }
    let want = workgroupUniformLoad(&settings);
    let out = p.first + row;
    base = out * p.vocab;
    temperature = bitcast<f32>(want[0]);
    mask = vec2<u32>(want[12], want[13]);
    bent = false;
    bound_key = 0u;
    bound_end = p.vocab;

    // What the model said, before anything is changed.
    var raw_top = 0u;
    var raw_sum = 0.0;
    if want[9] > 0u {
        let raw_best = best_after(lane, 0xffffffffu, 0u);
        raw_top = raw_best.x;
        top_key = raw_top;
        temperature = 1.0;
        raw_sum = mass_from(lane, 0u);
        temperature = bitcast<f32>(want[0]);
        var count = LIST + 1u;
        if want[9] > 1u {
            // What is no number has key 0.
            count = list_best(lane, want[9] - 1u, 1u);
        }
        if count <= LIST {
            for (var n = 1u + lane; n < want[9]; n += LANES) {
                let there = n <= count;
                let told = list[min(n, LIST) - 1u];
                ranks[out * BESIDE + n] = select(-1, i32(told.y), there);
                logprobs[out * BESIDE + n] = logprob(select(0u, told.x, there), raw_top, raw_sum);
            }
        }
        var best = vec2<u32>(0xffffffffu, 0u);
        for (var n = 1u; n < want[9] && count > LIST; n++) {
            best = best_after(lane, best.x, best.y);
            if lane == 0u {
                let none = best.x == 0u;
                ranks[out * BESIDE + n] = select(i32(best.y), -1, none);
                logprobs[out * BESIDE + n] = logprob(best.x, raw_top, raw_sum);
            }
        }
        for (var n = want[9] + lane; n < BESIDE; n += LANES) {
            ranks[out * BESIDE + n] = -1;
        }
    }

    // Biases and penalties, and what was there before them.
    var last = -1;
    if want[8] > 0u {
        last = previous[want[8] - 1u];
        last = select(-1, last, u32(last) < p.vocab);
    }
    for (var c = want[10] + lane * CHANGE; c < want[11]; c += LANES * CHANGE) {
        let token = work[c];
        let once_more = i32(token) == last;
        if once_more {
            atomicStore(&last_is_listed, 1u);
        }
        let kept = logits[base + token];
        let recent = (work[c + 2u] & 1u) == 1u || once_more;
        let generated = (work[c + 2u] >> 1u) + u32(once_more);
        logits[base + token] = changed(kept, work[c + 1u], recent, generated);
        work[c + 3u] = kept;
    }
    storageBarrier();
    workgroupBarrier();
    let last_alone = last >= 0 && atomicLoad(&last_is_listed) == 0u;
    var kept_last = 0u;
    if last_alone && lane == 0u {
        kept_last = logits[base + u32(last)];
        logits[base + u32(last)] = changed(kept_last, 0u, true, 1u);
    }
    storageBarrier();
    workgroupBarrier();
    bent = true;

    let best = best_after(lane, 0xffffffffu, 0u);
    top_key = best.x;
    var nans = 0.0;
    for (var i = lane; i < p.vocab; i += LANES) {
        nans += f32(key_at(i) == 0u);
    }
    nans = lane_sum(lane, nans);
    var token = best.y;
    if want[0] != 0u {
        let by_k = want[1] > 0u && want[1] < p.vocab;
        let by_p = (want[14] & 1u) == 1u;
        var least_key = 0u;
        if (want[14] & 2u) == 2u && top_key > LOWEST_KEY && top_key < HIGHEST_KEY {
            // The logarithm is the host's.
            let least = bitcast<f32>(bits_of(top_key)) + temperature * bitcast<f32>(want[3]);
            least_key = min(key_of(bitcast<u32>(least)), top_key);
        }
        let unit = bitcast<f32>(want[7]);
        let draw = Draw(
            select(0u, want[1], by_k),
            select(-1.0, bitcast<f32>(want[2]), by_p),
            least_key,
            unit,
        );
        // Of 256 parts, 230 have about 590 tokens as likely as that, and 245 have 800: more may have no room.
        let most = select(245u, PARTS, p.vocab <= PARTS);
        var least = select(230u, PARTS, p.vocab <= PARTS);
        if by_k {
            least = want[1];
        }
        var is_drawn = false;
        if (by_k || by_p) && least <= most {
            var all_mass = 0.0;
            if !by_k {
                all_mass = mass_from(lane, 0u);
            }
            // What is impossible weighs nothing, and may be nearly all.
            let count = list_best(lane, least, LOWEST_KEY + 1u);
            if count <= LIST {
                let drawn = draw_from_list(lane, count, draw, all_mass);
                token = drawn.x;
                is_drawn = drawn.y == 1u;
            }
        }
        if !is_drawn {
            if by_k {
                cut_to_k(lane, want[1]);
            }
            if by_p {
                cut_to_p(lane, bitcast<f32>(want[2]));
            }
            if least_key > bound_key {
                bound_key = least_key;
                bound_end = p.vocab;
            }
            if by_k || by_p {
                token = draw_by_rank(lane, unit);
            } else {
                token = draw_by_index(lane, unit);
            }
        }
    }

    // The row as it was.
    storageBarrier();
    workgroupBarrier();
    for (var c = want[10] + lane * CHANGE; c < want[11]; c += LANES * CHANGE) {
        logits[base + work[c]] = work[c + 3u];
    }
    if last_alone && lane == 0u {
        logits[base + u32(last)] = kept_last;
    }
    storageBarrier();
    workgroupBarrier();
    bent = false;
    if want[9] > 0u {
        let key = key_of(logits[base + token]);
        var above = 0.0;
        for (var i = lane; i < p.vocab; i += LANES) {
            let other = key_of(logits[base + i]);
            above += f32(other > key || (other == key && i < token));
        }
        above = lane_sum(lane, above);
        if lane == 0u {
            ranks[out * BESIDE] = i32(above) + 1;
            logprobs[out * BESIDE] = logprob(key, raw_top, raw_sum);
        }
    }
    if lane == 0u {
        let none = select(-2, -1, nans > 0.0);
        tokens[out] = select(i32(token), none, top_key <= LOWEST_KEY);
    }
}
