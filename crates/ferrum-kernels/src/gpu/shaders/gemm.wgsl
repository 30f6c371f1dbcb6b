// out[r, n] = sum over k of x[r, k] * weight[n, k], for ROWS rows and 4 columns in a workgroup.
//
// Lane l sums the groups of four elements l, l + 32, l + 64, …; then one lane for each output adds
// the 32 partial sums in lane order. ROWS only decides how often a loaded weight is used.

struct Params {
    rows: u32,
    k: u32,
    stride: u32, // of a weight row, in groups of four
    columns: u32, // in this buffer
    first_column: u32,
    out_stride: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(1) @binding(1) var<storage, read> x: array<f32>;
@group(1) @binding(2) var<storage, read_write> out: array<f32>;

const LANES = 32u;

var<workgroup> partial: array<vec4<f32>, LANES * ROWS>;

fn x4(row: u32, k: u32) -> vec4<f32> {
    let i = row * p.k + k;
    if k + 4u <= p.k {
        return vec4<f32>(x[i], x[i + 1u], x[i + 2u], x[i + 3u]);
    }
    // The weight is padded with zeros, but zero times the neighbour's NaN would be NaN.
    var v = vec4<f32>(x[i], 0.0, 0.0, 0.0);
    if k + 1u < p.k {
        v.y = x[i + 1u];
    }
    if k + 2u < p.k {
        v.z = x[i + 2u];
    }
    return v;
}

@compute @workgroup_size(LANES)
fn main(at: Place) {
    let row_tiles = (p.rows + ROWS - 1u) / ROWS;
    let group = group_of(at);
    let column = group / row_tiles * 4u;
    let row = group % row_tiles * ROWS;
    if column >= p.columns {
        return;
    }
    // Columns and rows beyond the end are computed as the last one, and not written.
    let last = p.columns - 1u;
    let w0 = min(column, last) * p.stride;
    let w1 = min(column + 1u, last) * p.stride;
    let w2 = min(column + 2u, last) * p.stride;
    let w3 = min(column + 3u, last) * p.stride;

    var sums: array<vec4<f32>, ROWS>;
    for (var r = 0u; r < ROWS; r++) {
        sums[r] = vec4<f32>();
    }
    for (var i = at.lane; i < p.stride; i += LANES) {
        let w = transpose(mat4x4<f32>(
            weight4(w0 + i),
            weight4(w1 + i),
            weight4(w2 + i),
            weight4(w3 + i),
        ));
        for (var r = 0u; r < ROWS; r++) {
            let v = x4(min(row + r, p.rows - 1u), i * 4u);
            var s = sums[r];
            s = fma(w[0], vec4<f32>(v.x), s);
            s = fma(w[1], vec4<f32>(v.y), s);
            s = fma(w[2], vec4<f32>(v.z), s);
            s = fma(w[3], vec4<f32>(v.w), s);
            sums[r] = s;
        }
    }
    for (var r = 0u; r < ROWS; r++) {
        partial[r * LANES + at.lane] = sums[r];
    }
    workgroupBarrier();

    // 4 * ROWS outputs, at most as many as there are lanes.
    let r = at.lane / 4u;
    let c = at.lane % 4u;
    if r < ROWS && row + r < p.rows && column + c < p.columns {
        var sum = 0.0;
        for (var l = 0u; l < LANES; l++) {
            sum += partial[r * LANES + l][c];
        }
        out[(row + r) * p.out_stride + p.first_column + column + c] = sum;
    }
}
