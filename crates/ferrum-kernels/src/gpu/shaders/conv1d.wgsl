// out[c, t] = bias[c] + sum over the group's channels i and taps k of
// x[i, t * stride + k - padding] * weight[c, i, k].

struct Params {
    total: u32,
    out_len: u32,
    len: u32,
    in_of_group: u32,
    out_of_group: u32,
    kernel: u32,
    stride: u32,
    padding: u32,
    has_bias: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(1) @binding(0) var<storage, read> x: array<f32>;
@group(1) @binding(1) var<storage, read> weight: array<f32>;
@group(1) @binding(2) var<storage, read> bias: array<f32>;
@group(1) @binding(3) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(256)
fn main(at: Place) {
    let o = element_of(at);
    if o >= p.total {
        return;
    }
    let c = o / p.out_len;
    let start = o % p.out_len * p.stride;
    let first_in = c / p.out_of_group * p.in_of_group;
    var sum = 0.0;
    for (var i = 0u; i < p.in_of_group; i++) {
        let w = (c * p.in_of_group + i) * p.kernel;
        for (var k = 0u; k < p.kernel; k++) {
            // Before the first element the difference wraps around and is beyond the last.
            let t = start + k - p.padding;
            if t < p.len {
                sum = fma(x[(first_in + i) * p.len + t], weight[w + k], sum);
            }
        }
    }
    if p.has_bias != 0u {
        sum += bias[c];
    }
    out[o] = sum;
}
