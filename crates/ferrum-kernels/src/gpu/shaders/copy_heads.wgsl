// dst[t, h, d] = src[t, h, d], each with strides of its own: splits, transposes, cache writes.

struct Params {
    total: u32,
    heads: u32,
    head_dim: u32,
    src_offset: u32,
    src_token: u32,
    src_head: u32,
    dst_offset: u32,
    dst_token: u32,
    dst_head: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(1) @binding(0) var<storage, read> src: array<f32>;
@group(1) @binding(1) var<storage, read_write> dst: array<f32>;

@compute @workgroup_size(256)
fn main(at: Place) {
    let i = element_of(at);
    if i >= p.total {
        return;
    }
    let d = i % p.head_dim;
    let h = i / p.head_dim % p.heads;
    let t = i / p.head_dim / p.heads;
    dst[p.dst_offset + t * p.dst_token + h * p.dst_head + d] =
        src[p.src_offset + t * p.src_token + h * p.src_head + d];
}
