// The last kernel - 1 inputs of each sequence to its state, oldest first. A lane has one channel of one
// sequence; each row comes from one behind it, or from this step.

struct Params {
    total: u32,
    channels: u32,
    kept: u32,
    tokens: u32,
    slots: u32,
    elements: u32, // of a state
    offset: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(1) @binding(0) var<storage, read> x: array<f32>;
@group(1) @binding(1) var<storage, read> query_starts: array<i32>;
@group(1) @binding(2) var<storage, read> state_slots: array<i32>;
@group(1) @binding(3) var<storage, read_write> states: array<f32>;

@compute @workgroup_size(256)
fn main(at: Place) {
    let o = element_of(at);
    if o >= p.total {
        return;
    }
    let s = o / p.channels;
    let c = o % p.channels;
    let start = u32(query_starts[s]);
    let end = u32(query_starts[s + 1u]);
    let slot = u32(state_slots[s]);
    if slot >= p.slots || end <= start || end > p.tokens {
        return;
    }
    let state = slot * p.elements + p.offset + c;
    for (var r = 0u; r < p.kept; r++) {
        let row = end - start + r;
        var u = 0.0;
        if row < p.kept {
            u = states[state + row * p.channels];
        } else {
            u = x[(start + row - p.kept) * p.channels + c];
        }
        states[state + r * p.channels] = u;
    }
}
