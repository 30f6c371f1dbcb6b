// rows[patch, o] = bias[o] + sum over channels and pixels of the patch of image * weight[o].

struct Params {
    total: u32,
    outs: u32,
    channels: u32,
    height: u32,
    width: u32,
    side: u32, // of a patch
    has_bias: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(1) @binding(0) var<storage, read> image: array<f32>;
@group(1) @binding(1) var<storage, read> weight: array<f32>;
@group(1) @binding(2) var<storage, read> bias: array<f32>;
@group(1) @binding(3) var<storage, read_write> rows: array<f32>;

@compute @workgroup_size(256)
fn main(at: Place) {
    let i = element_of(at);
    if i >= p.total {
        return;
    }
    let o = i % p.outs;
    let index = i / p.outs;
    let patches_x = p.width / p.side;
    let top = index / patches_x * p.side;
    let left = index % patches_x * p.side;
    var w = o * p.channels * p.side * p.side;
    var sum = 0.0;
    for (var c = 0u; c < p.channels; c++) {
        for (var y = 0u; y < p.side; y++) {
            let line = (c * p.height + top + y) * p.width + left;
            for (var x = 0u; x < p.side; x++) {
                sum = fma(image[line + x], weight[w], sum);
                w++;
            }
        }
    }
    if p.has_bias != 0u {
        sum += bias[o];
    }
    rows[i] = sum;
}
