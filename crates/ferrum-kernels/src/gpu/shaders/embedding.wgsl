// out[i, :] = table[ids[i], :] for the ids that lie in this buffer of the table. The first of a
// table's buffers also writes zeros for ids outside the whole table.

struct Params {
    tokens: u32,
    dim: u32,
    stride: u32, // of a table row, in groups of four
    first_row: u32,
    rows: u32, // in this buffer
    table_rows: u32,
    writes_outside: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(1) @binding(1) var<storage, read> ids: array<i32>;
@group(1) @binding(2) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(256)
fn main(at: Place) {
    let i = element_of(at);
    let token = i / p.stride;
    let group = i % p.stride;
    if token >= p.tokens {
        return;
    }
    // A negative id becomes one beyond any table.
    let id = bitcast<u32>(ids[token]);
    var value = vec4<f32>();
    if id >= p.first_row && id - p.first_row < p.rows {
        value = weight4((id - p.first_row) * p.stride + group);
    } else if id < p.table_rows || p.writes_outside == 0u {
        return;
    }
    for (var d = 0u; d < 4u; d++) {
        if group * 4u + d < p.dim {
            out[token * p.dim + group * 4u + d] = value[d];
        }
    }
}
