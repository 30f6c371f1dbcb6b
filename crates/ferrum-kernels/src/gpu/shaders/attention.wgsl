// Softmax attention of one query of one head over the keys that it sees, in tiles of 64 keys.
//
// The text that follows this one says where things are: `locate(token)` fills in the query's own
// index and the number of keys, `find_key(j)` where key j lies, `key_pair` and `value_pair` give two
// elements. Tiles begin at multiples of 64 of the key's index, so that a query's sums have one order
// however it is batched, chunked or paged.

struct Call {
    tokens: u32,
    heads: u32,
    group: u32, // query heads of a kv head
    key_dim: u32,
    value_dim: u32,
    q_token: u32,
    q_head: u32,
    out_token: u32,
    out_head: u32,
    scale: f32,
    softcap: f32, // 0: none
    is_causal: u32,
    window: u32,
    has_sinks: u32,
    is_chunked: u32,
    padding: u32, // to 16 words
}

// A query's own key index and the number of keys.
struct Query {
    index: i32,
    keys: i32,
}

const LANES = 64u;
const MAX_PAIRS = 512u;
const LOWEST = -3.0e38;

var<workgroup> query: array<vec2<f32>, MAX_PAIRS>;
var<workgroup> sums: array<vec2<f32>, MAX_PAIRS>;
var<workgroup> weights: array<f32, LANES>;
var<workgroup> places: array<u32, LANES>;
var<workgroup> range: vec2<i32>;

@group(1) @binding(0) var<storage, read> q: array<f32>;
@group(1) @binding(3) var<storage, read> sinks: array<f32>;
@group(1) @binding(4) var<storage, read_write> out: array<f32>;

// The keys from x on and before y that a query sees.
fn visible(c: Call, at: Query) -> vec2<i32> {
    let window = i32(c.window);
    var start = max(at.index + 1 - window, 0);
    if c.is_chunked != 0u {
        start = at.index + 1;
        if window > 0 {
            start = at.index - at.index % window;
        }
    }
    // Where the keys of a window begin, counted from a query's own.
    let first = select(at.index, start, c.is_chunked != 0u);
    var end = at.keys;
    if c.is_causal != 0u {
        end = min(at.index + 1, at.keys);
    } else if at.keys - first > window {
        end = first + window;
    }
    return vec2<i32>(start, end);
}

fn score(c: Call, place: u32) -> f32 {
    var dot = 0.0;
    let pairs = (c.key_dim + 1u) / 2u;
    for (var i = 0u; i < pairs; i++) {
        let k = key_pair(place, i);
        dot = fma(query[i].x, k.x, dot);
        dot = fma(query[i].y, k.y, dot);
    }
    dot *= c.scale;
    if c.softcap > 0.0 {
        dot = c.softcap * tanh_of(dot / c.softcap);
    }
    return dot;
}

fn attend(c: Call, lane: u32, group: u32) {
    let token = group / c.heads;
    let head = group % c.heads;
    let kv_head = head / c.group;
    let value_pairs = (c.value_dim + 1u) / 2u;

    // The query to workgroup memory; an odd one is filled up with zero.
    let q_base = token * c.q_token + head * c.q_head;
    for (var i = lane; i < (c.key_dim + 1u) / 2u; i += LANES) {
        var pair = vec2<f32>(q[q_base + 2u * i], 0.0);
        if 2u * i + 1u < c.key_dim {
            pair.y = q[q_base + 2u * i + 1u];
        }
        query[i] = pair;
    }
    for (var i = lane; i < value_pairs; i += LANES) {
        sums[i] = vec2<f32>();
    }
    if lane == 0u {
        range = visible(c, locate(token));
    }
    // Also a barrier.
    let keys = workgroupUniformLoad(&range);

    var highest = LOWEST;
    var total = 0.0;
    for (var tile = keys.x / i32(LANES) * i32(LANES); tile < keys.y; tile += i32(LANES)) {
        let first = u32(max(keys.x - tile, 0));
        let end = u32(min(keys.y - tile, i32(LANES)));
        let mine = lane >= first && lane < end;
        var s = LOWEST;
        if mine {
            let place = find_key(u32(tile) + lane, kv_head);
            places[lane] = place;
            s = score(c, place);
            weights[lane] = s;
        }
        workgroupBarrier();
        var tile_highest = highest;
        for (var j = first; j < end; j++) {
            tile_highest = max(tile_highest, weights[j]);
        }
        workgroupBarrier();
        if mine {
            weights[lane] = exp(max(s - tile_highest, -100.0));
        }
        workgroupBarrier();
        // How much what was summed so far counts under the new maximum.
        let before = select(exp(max(highest - tile_highest, -100.0)), 0.0, highest == LOWEST);
        var tile_total = 0.0;
        for (var j = first; j < end; j++) {
            tile_total += weights[j];
        }
        total = total * before + tile_total;
        highest = tile_highest;
        for (var i = lane; i < value_pairs; i += LANES) {
            var sum = sums[i] * before;
            for (var j = first; j < end; j++) {
                sum = fma(vec2<f32>(weights[j]), value_pair(places[j], i), sum);
            }
            sums[i] = sum;
        }
        workgroupBarrier();
    }

    var factor = 0.0;
    if keys.x < keys.y {
        if c.has_sinks != 0u {
            let sink = sinks[head];
            let top = max(highest, sink);
            let kept = exp(max(highest - top, -100.0));
            factor = kept / (total * kept + exp(max(sink - top, -100.0)));
        } else {
            factor = 1.0 / total;
        }
    }
    let out_base = token * c.out_token + head * c.out_head;
    for (var i = lane; i < value_pairs; i += LANES) {
        out[out_base + 2u * i] = sums[i].x * factor;
        if 2u * i + 1u < c.value_dim {
            out[out_base + 2u * i + 1u] = sums[i].y * factor;
        }
    }
}
