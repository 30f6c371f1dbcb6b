// out[r, d] = activation(gate[r, d]) * up[r, d] for rows [gate | up].

struct Params {
    len: u32,
    dim: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(1) @binding(0) var<storage, read> gate_up: array<f32>;
@group(1) @binding(1) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(256)
fn main(at: Place) {
    let i = element_of(at);
    if i < p.len {
        let gate = i / p.dim * p.dim + i;
        out[i] = activation(KIND, gate_up[gate]) * gate_up[gate + p.dim];
    }
}
