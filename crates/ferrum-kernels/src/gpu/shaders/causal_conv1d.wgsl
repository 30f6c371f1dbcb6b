// out[t, c] = bias[c] + sum over taps of weight[c, tap] * u[t - (kernel - 1) + tap, c], where u are a
// sequence's inputs; those before this step are in its state, oldest first.

struct Params {
    total: u32,
    channels: u32,
    kernel: u32,
    seqs: u32,
    slots: u32,
    elements: u32, // of a state
    offset: u32,
    has_bias: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(1) @binding(0) var<storage, read> x: array<f32>;
@group(1) @binding(1) var<storage, read> weight: array<f32>;
@group(1) @binding(2) var<storage, read> bias: array<f32>;
@group(1) @binding(3) var<storage, read> states: array<f32>;
@group(1) @binding(4) var<storage, read> query_starts: array<i32>;
@group(1) @binding(5) var<storage, read> state_slots: array<i32>;
@group(1) @binding(6) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(256)
fn main(at: Place) {
    let o = element_of(at);
    if o >= p.total {
        return;
    }
    let token = o / p.channels;
    let c = o % p.channels;
    let s = sequence_of(p.seqs, token);
    let start = u32(query_starts[s]);
    let slot = u32(state_slots[s]);
    // A slot that is not there has no state, and a token before its sequence no input.
    if slot >= p.slots || token < start {
        return;
    }
    let state = slot * p.elements + p.offset;
    let kept = p.kernel - 1u;
    var sum = 0.0;
    if p.has_bias != 0u {
        sum = bias[c];
    }
    for (var tap = 0u; tap < p.kernel; tap++) {
        let row = token - start + tap;
        var u = 0.0;
        if row < kept {
            u = states[state + row * p.channels + c];
        } else {
            u = x[(start + row - kept) * p.channels + c];
        }
        sum = fma(weight[c * p.kernel + tap], u, sum);
    }
    out[o] = sum;
}
