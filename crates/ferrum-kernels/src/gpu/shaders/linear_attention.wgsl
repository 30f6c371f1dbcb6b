// Linear attention over states that decay. A lane has a column of a head's state, of one sequence, and goes through the
// tokens: decay, an update by key and value, and what the state says of the query.

struct Params {
    total: u32, // seqs * value_heads * value_dim
    key_heads: u32,
    value_heads: u32,
    key_dim: u32,
    value_dim: u32,
    tokens: u32,
    slots: u32,
    elements: u32, // of a state
    offset: u32,
    is_delta: u32,
    is_interleaved: u32, // value head h reads key head h % key_heads
}

@group(0) @binding(0) var<uniform> p: Params;
@group(1) @binding(0) var<storage, read> x: array<f32>;
@group(1) @binding(1) var<storage, read> gates: array<f32>;
@group(1) @binding(2) var<storage, read> params: array<f32>; // [3, value_heads]: decay, bias of the step, skip
@group(1) @binding(3) var<storage, read> query_starts: array<i32>;
@group(1) @binding(4) var<storage, read> state_slots: array<i32>;
@group(1) @binding(5) var<storage, read_write> states: array<f32>;
@group(1) @binding(6) var<storage, read_write> out: array<f32>;

fn softplus(v: f32) -> f32 {
    // log(1 + e) loses what is small: the second term of its series then.
    let e = exp(-abs(v));
    let small = e * (1.0 - 0.5 * e);
    return max(v, 0.0) + select(log(1.0 + e), small, e < 1e-3);
}

fn length_of(first: u32) -> f32 {
    var sum = 0.0;
    for (var i = 0u; i < p.key_dim; i++) {
        let v = x[first + i];
        sum = fma(v, v, sum);
    }
    return sqrt(sum + 1e-6);
}

@compute @workgroup_size(256)
fn main(at: Place) {
    let o = element_of(at);
    if o >= p.total {
        return;
    }
    let values = p.value_heads * p.value_dim;
    let keys = p.key_heads * p.key_dim;
    let s = o / values;
    let head = o % values / p.value_dim;
    let c = o % p.value_dim;
    let start = u32(max(query_starts[s], 0));
    let end = min(u32(max(query_starts[s + 1u], 0)), p.tokens);
    let slot = u32(state_slots[s]);
    if slot >= p.slots {
        return;
    }
    let state = slot * p.elements + p.offset + head * p.key_dim * p.value_dim + c;
    let grouped = head / (p.value_heads / p.key_heads);
    let of_key = select(grouped, head % p.key_heads, p.is_interleaved != 0u) * p.key_dim;
    for (var t = start; t < end; t++) {
        let row = t * (2u * keys + values);
        var query = row + of_key;
        var key = row + keys + of_key;
        var value = row + 2u * keys + head * p.value_dim + c;
        var step = 0.0;
        var share = 0.0;
        var of_query = 1.0;
        var of_keys = 1.0;
        if p.is_delta != 0u {
            let gate = t * 2u * p.value_heads + head;
            step = softplus(gates[gate + p.value_heads] + params[p.value_heads + head]);
            share = 1.0 / (1.0 + exp(-gates[gate]));
            of_query = 1.0 / (length_of(query) * sqrt(f32(p.key_dim)));
            of_keys = 1.0 / length_of(key);
        } else {
            query = row + values + keys + of_key;
            key = row + values + of_key;
            value = row + head * p.value_dim + c;
            step = softplus(gates[t * p.value_heads + head] + params[p.value_heads + head]);
            share = step;
        }
        let decay = exp(params[head] * step);
        let v = x[value];
        var said = 0.0;
        if p.is_delta != 0u {
            for (var i = 0u; i < p.key_dim; i++) {
                let kept = decay * states[state + i * p.value_dim];
                said = fma(x[key + i] * of_keys, kept, said);
            }
        }
        let update = share * (v - said);
        var sum = params[2u * p.value_heads + head] * v;
        for (var i = 0u; i < p.key_dim; i++) {
            let place = state + i * p.value_dim;
            let next = fma(x[key + i] * of_keys, update, decay * states[place]);
            states[place] = next;
            sum = fma(x[query + i] * of_query, next, sum);
        }
        out[t * values + head * p.value_dim + c] = sum;
    }
}
