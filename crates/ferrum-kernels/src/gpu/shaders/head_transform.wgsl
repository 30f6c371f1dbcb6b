// Norm and rotation of one head in workgroup memory; the shader that follows fills `head` and
// writes it out, each lane the elements lane, lane + 64, …

const MAX_HEAD_DIM = 1024u;

var<workgroup> head: array<f32, MAX_HEAD_DIM>;

// head = head / sqrt(mean(head * head) + eps) * weight[d]; each lane its own elements.
fn head_scale(lane: u32, head_dim: u32, eps: f32) -> f32 {
    var squares = 0.0;
    for (var d = lane; d < head_dim; d += LANES) {
        squares = fma(head[d], head[d], squares);
    }
    return 1.0 / sqrt(lane_sum(lane, squares) / f32(head_dim) + eps);
}

// (a, b) -> (a cos - b sin, b cos + a sin). The pairs are (i, i + half), or (2i, 2i + 1).
fn rotate_pair(i: u32, half: u32, interleaved: bool, c: f32, s: f32) {
    let first = select(i, 2u * i, interleaved);
    let second = select(i + half, 2u * i + 1u, interleaved);
    let a = head[first];
    let b = head[second];
    head[first] = a * c - b * s;
    head[second] = b * c + a * s;
}

// The row of the tables for a token: never outside them, whatever the buffer says.
fn table_row(row: i32, last: u32) -> u32 {
    return min(bitcast<u32>(max(row, 0)), last);
}
