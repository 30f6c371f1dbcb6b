// out[row] = lowest index of the largest element, by the keys of bits.

struct Params {
    rows: u32,
    dim: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(1) @binding(0) var<storage, read> x: array<u32>;
@group(1) @binding(1) var<storage, read_write> out: array<u32>;

const LANES = 64u;

var<workgroup> keys: array<u32, LANES>;
var<workgroup> indices: array<u32, LANES>;

@compute @workgroup_size(LANES)
fn main(at: Place) {
    let row = group_of(at);
    if row >= p.rows {
        return;
    }
    var best = 0u;
    var index = 0u;
    for (var i = at.lane; i < p.dim; i += LANES) {
        let key = key_of(x[row * p.dim + i]);
        if key > best {
            best = key;
            index = i;
        }
    }
    keys[at.lane] = best;
    indices[at.lane] = index;
    workgroupBarrier();
    if at.lane == 0u {
        for (var l = 1u; l < LANES; l++) {
            let key = keys[l];
            if key > best || (key == best && key != 0u && indices[l] < index) {
                best = key;
                index = indices[l];
            }
        }
        out[row] = index;
    }
}
