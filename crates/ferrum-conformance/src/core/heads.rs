//! From a fused projection to heads: split, norm, rotation, layout, contiguous cache.

use crate::case::{Cases, OpImplementations, act_name, both, implementations, label};
use crate::compare::Tolerance;
use crate::data::Rng;
use crate::io::{Check, Io};
use crate::naive;
use ferrum_kernels::{
    Backend, CacheSpan, HeadLayout, HeadsShape, QkNorm, QkvShape, QkvTransform, Rope, RopeStyle,
};

/// A [`QkvTransform`] on the host.
#[derive(Clone)]
pub(crate) struct Transform {
    pub(crate) q_norm: Option<Vec<f32>>,
    pub(crate) k_norm: Option<Vec<f32>>,
    pub(crate) eps: f32,
    pub(crate) rope: Option<RopeTable>,
}

/// A [`Rope`] on the host.
#[derive(Clone)]
pub(crate) struct RopeTable {
    cos: Vec<f32>,
    sin: Vec<f32>,
    rows: Vec<i32>,
    rot_dim: usize,
    style: RopeStyle,
}

/// What [`Transform`] does, in one of its many combinations.
#[derive(Clone, Copy)]
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    norm: bool,
    /// Rotated part of a head (over 4) and pairing.
    rope: Option<(usize, RopeStyle)>,
}

pub(crate) const KINDS: [Kind; 6] = [
    Kind {
        name: "neither norm nor rope",
        norm: false,
        rope: None,
    },
    Kind {
        name: "norm",
        norm: true,
        rope: None,
    },
    Kind {
        name: "rope, half-split",
        norm: false,
        rope: Some((4, RopeStyle::HalfSplit)),
    },
    Kind {
        name: "rope, interleaved",
        norm: false,
        rope: Some((4, RopeStyle::Interleaved)),
    },
    Kind {
        name: "norm, partial rope, half-split",
        norm: true,
        rope: Some((2, RopeStyle::HalfSplit)),
    },
    Kind {
        name: "norm, partial rope, interleaved",
        norm: true,
        rope: Some((3, RopeStyle::Interleaved)),
    },
];

impl Transform {
    pub(crate) fn new(rng: &mut Rng, kind: Kind, head_dim: usize, tokens: usize) -> Self {
        let table_rows = 50;
        let rope = kind.rope.map(|(quarters, style)| {
            // Even, and at least one pair.
            let rot_dim = (head_dim * quarters / 8 * 2).max(2);
            // Any factors do; those of a YaRN table are not on the unit circle either.
            RopeTable {
                cos: rng.floats(table_rows * rot_dim / 2, 1.0),
                sin: rng.floats(table_rows * rot_dim / 2, 1.0),
                rows: rng.indices(tokens, table_rows),
                rot_dim,
                style,
            }
        });
        Transform {
            q_norm: kind.norm.then(|| rng.norm_weights(head_dim)),
            k_norm: kind.norm.then(|| rng.norm_weights(head_dim)),
            eps: 1e-6,
            rope,
        }
    }

    /// The transform for tokens `range` of those it was made for.
    pub(crate) fn slice(&self, range: std::ops::Range<usize>) -> Self {
        let mut part = self.clone();
        if let Some(rope) = &mut part.rope {
            rope.rows = rope.rows[range].to_vec();
        }
        part
    }

    /// A head of token `token`, normed and rotated.
    pub(crate) fn apply(&self, norm: Option<&[f32]>, head: &[f32], token: usize) -> Vec<f64> {
        let mut head = naive::wide(head);
        if let Some(weight) = norm {
            head = naive::rms_norm(&head, weight, self.eps);
        }
        if let Some(rope) = &self.rope {
            let half = rope.rot_dim / 2;
            let row = rope.rows[token] as usize * half;
            let (cos, sin) = (&rope.cos[row..][..half], &rope.sin[row..][..half]);
            naive::rotate(&mut head, cos, sin, rope.rot_dim, rope.style);
        }
        head
    }
}

/// Device buffers behind a [`QkvTransform`].
pub(crate) struct TransformBuffers<B: Backend> {
    q_norm: Option<B::Buffer<f32>>,
    k_norm: Option<B::Buffer<f32>>,
    eps: f32,
    rope: Option<RopeBuffers<B>>,
}

struct RopeBuffers<B: Backend> {
    cos: B::Buffer<f32>,
    sin: B::Buffer<f32>,
    rows: B::Buffer<i32>,
    rot_dim: usize,
    style: RopeStyle,
}

impl<B: Backend> RopeBuffers<B> {
    fn new(io: &mut Io<'_, B>, rope: &RopeTable) -> Check<Self> {
        Ok(RopeBuffers {
            // The tables have as many rows as they have; no shape says how many.
            cos: io.exact(&rope.cos)?,
            sin: io.exact(&rope.sin)?,
            rows: io.indices("rope rows", &rope.rows)?,
            rot_dim: rope.rot_dim,
            style: rope.style,
        })
    }

    fn rope(&self) -> Rope<'_, B> {
        Rope {
            cos: &self.cos,
            sin: &self.sin,
            rows: &self.rows,
            rot_dim: self.rot_dim,
            style: self.style,
        }
    }
}

impl<B: Backend> TransformBuffers<B> {
    pub(crate) fn new(io: &mut Io<'_, B>, transform: &Transform) -> Check<Self> {
        let rope = match &transform.rope {
            Some(rope) => Some(RopeBuffers::new(io, rope)?),
            None => None,
        };
        Ok(TransformBuffers {
            q_norm: io.optional_floats("q_norm", transform.q_norm.as_deref())?,
            k_norm: io.optional_floats("k_norm", transform.k_norm.as_deref())?,
            eps: transform.eps,
            rope,
        })
    }

    pub(crate) fn transform(&self) -> QkvTransform<'_, B> {
        let eps = self.eps;
        QkvTransform {
            q_norm: self.q_norm.as_ref().map(|weight| QkNorm { weight, eps }),
            k_norm: self.k_norm.as_ref().map(|weight| QkNorm { weight, eps }),
            rope: self.rope.as_ref().map(RopeBuffers::rope),
        }
    }
}

/// A fused projection on the host.
struct Qkv {
    shape: QkvShape,
    qkv: Vec<f32>,
    transform: Transform,
    span: CacheSpan,
    layout: HeadLayout,
}

fn make(rng: &mut Rng, shape: QkvShape, kind: Kind, scale: f32) -> Qkv {
    Qkv {
        shape,
        qkv: rng.acts(shape.tokens * shape.row_dim(), scale),
        transform: Transform::new(rng, kind, shape.head_dim, shape.tokens),
        span: CacheSpan {
            capacity: shape.tokens + 5,
            offset: 3,
        },
        layout: HeadLayout::TokenMajor,
    }
}

/// Token-major q, k and v of a fused projection, by the formulas.
pub(crate) fn transformed(qkv: &[f32], transform: &Transform, shape: QkvShape) -> [Vec<f64>; 3] {
    let mut parts = [vec![], vec![], vec![]];
    for (token, row) in qkv.chunks(shape.row_dim()).enumerate() {
        let (heads, values) = row.split_at(shape.q_dim() + shape.k_dim());
        for (i, head) in heads.chunks(shape.head_dim).enumerate() {
            let (part, norm) = match i < shape.heads {
                true => (0, &transform.q_norm),
                false => (1, &transform.k_norm),
            };
            parts[part].extend(transform.apply(norm.as_deref(), head, token));
        }
        parts[2].extend(naive::wide(values));
    }
    parts
}

/// `[a, b, dim]` → `[b, a, dim]`.
fn transposed<T: Copy>(values: &[T], a: usize, b: usize, dim: usize) -> Vec<T> {
    let mut out = Vec::with_capacity(values.len());
    for j in 0..b {
        for i in 0..a {
            out.extend_from_slice(&values[(i * b + j) * dim..][..dim]);
        }
    }
    out
}

fn split_qkv<B: Backend>(io: &mut Io<'_, B>, data: &Qkv) -> Check {
    let shape = data.shape;
    let [q_len, k_len, v_len] = [shape.q(), shape.k(), shape.v()].map(HeadsShape::len);
    let qkv = io.input("qkv", &data.qkv)?;
    let mut q = io.output("q", q_len)?;
    let mut k = io.output("k", k_len)?;
    let mut v = io.output("v", v_len)?;
    B::split_qkv(&mut io.ctx, &qkv, &mut q, &mut k, &mut v, shape)?;
    io.take("q", &q, q_len)?;
    io.take("k", &k, k_len)?;
    io.take("v", &v, v_len)
}

fn split_qkv_formula(data: &Qkv) -> Vec<Vec<f64>> {
    let plain = Transform {
        q_norm: None,
        k_norm: None,
        rope: None,
        eps: 0.0,
    };
    transformed(&data.qkv, &plain, data.shape).to_vec()
}

/// The q part alone, in the layout of the case.
fn q_heads(data: &Qkv) -> Vec<f32> {
    let HeadsShape {
        tokens,
        heads,
        head_dim,
    } = data.shape.q();
    let values = &data.qkv[..data.shape.q().len()];
    match data.layout {
        HeadLayout::TokenMajor => values.to_vec(),
        HeadLayout::HeadMajor => transposed(values, tokens, heads, head_dim),
    }
}

fn qk_norm_rope<B: Backend>(io: &mut Io<'_, B>, data: &Qkv) -> Check {
    let len = data.shape.q().len();
    // Only the norm of queries is asked for.
    let transform = Transform {
        k_norm: None,
        ..data.transform.clone()
    };
    let buffers = TransformBuffers::new(io, &transform)?;
    let mut x = io.inout("x", &q_heads(data))?;
    let QkvTransform { q_norm, rope, .. } = buffers.transform();
    B::qk_norm_rope(
        &mut io.ctx,
        &mut x,
        data.layout,
        q_norm,
        rope,
        data.shape.q(),
    )?;
    io.take("x", &x, len)
}

fn qk_norm_rope_formula(data: &Qkv) -> Vec<Vec<f64>> {
    let HeadsShape {
        tokens,
        heads,
        head_dim,
    } = data.shape.q();
    let norm = data.transform.q_norm.as_deref();
    let vectors = data.qkv[..data.shape.q().len()]
        .chunks(head_dim)
        .enumerate();
    let out: Vec<f64> = vectors
        .flat_map(|(i, head)| data.transform.apply(norm, head, i / heads))
        .collect();
    match data.layout {
        HeadLayout::TokenMajor => vec![out],
        HeadLayout::HeadMajor => vec![transposed(&out, tokens, heads, head_dim)],
    }
}

fn split_qkv_norm_rope<B: Backend>(io: &mut Io<'_, B>, data: &Qkv) -> Check {
    let shape = data.shape;
    let [q_len, k_len, v_len] = [shape.q(), shape.k(), shape.v()].map(HeadsShape::len);
    let buffers = TransformBuffers::new(io, &data.transform)?;
    let qkv = io.input("qkv", &data.qkv)?;
    let mut q = io.output("q", q_len)?;
    let mut k = io.output("k", k_len)?;
    let mut v = io.output("v", v_len)?;
    let transform = buffers.transform();
    B::split_qkv_norm_rope(&mut io.ctx, &qkv, &mut q, &mut k, &mut v, transform, shape)?;
    io.take("q", &q, q_len)?;
    io.take("k", &k, k_len)?;
    io.take("v", &v, v_len)
}

/// Head-major q, k and v.
fn split_qkv_norm_rope_formula(data: &Qkv) -> Vec<Vec<f64>> {
    let QkvShape {
        tokens,
        heads,
        kv_heads,
        head_dim,
        value_dim,
    } = data.shape;
    let [q, k, v] = transformed(&data.qkv, &data.transform, data.shape);
    vec![
        transposed(&q, tokens, heads, head_dim),
        transposed(&k, tokens, kv_heads, head_dim),
        transposed(&v, tokens, kv_heads, value_dim),
    ]
}

/// What a cache holds where nothing was written.
const UNTOUCHED: f32 = -77.0;

/// Elements of the caches of keys and of values.
fn cache_lens(data: &Qkv) -> [usize; 2] {
    let shape = data.shape;
    [shape.head_dim, shape.value_dim].map(|dim| shape.kv_heads * data.span.capacity * dim)
}

fn into_cache<B: Backend>(io: &mut Io<'_, B>, data: &Qkv) -> Check {
    let (q_len, [k_len, v_len]) = (data.shape.q().len(), cache_lens(data));
    let buffers = TransformBuffers::new(io, &data.transform)?;
    let qkv = io.input("qkv", &data.qkv)?;
    let mut q = io.output("q", q_len)?;
    let mut k = io.inout("k_cache", &vec![UNTOUCHED; k_len])?;
    let mut v = io.inout("v_cache", &vec![UNTOUCHED; v_len])?;
    let (caches, transform) = ((&mut k, &mut v), buffers.transform());
    B::split_qkv_norm_rope_into_cache(
        &mut io.ctx,
        &qkv,
        &mut q,
        caches,
        data.span,
        transform,
        data.shape,
    )?;
    io.take("q", &q, q_len)?;
    io.take("k_cache", &k, k_len)?;
    io.take("v_cache", &v, v_len)
}

fn into_cache_formula(data: &Qkv) -> Vec<Vec<f64>> {
    let mut parts = split_qkv_norm_rope_formula(data);
    for (part, heads) in parts[1..].iter_mut().zip([data.shape.k(), data.shape.v()]) {
        *part = cached(data, part, heads);
    }
    parts
}

/// Head-major `[kv_heads, tokens, head_dim]` inside an untouched cache.
fn cached(data: &Qkv, part: &[f64], shape: HeadsShape) -> Vec<f64> {
    let HeadsShape {
        tokens,
        heads,
        head_dim,
    } = shape;
    let mut cache = vec![f64::from(UNTOUCHED); heads * data.span.capacity * head_dim];
    for head in 0..heads {
        let at = (head * data.span.capacity + data.span.offset) * head_dim;
        let from = head * tokens * head_dim;
        cache[at..][..tokens * head_dim].copy_from_slice(&part[from..][..tokens * head_dim]);
    }
    cache
}

/// k and v as the parts of the projection hold them, read as head-major.
fn kv_parts(data: &Qkv) -> [Vec<f32>; 2] {
    let [_, k, v] = transformed(
        &data.qkv,
        &Transform {
            q_norm: None,
            k_norm: None,
            rope: None,
            eps: 0.0,
        },
        data.shape,
    );
    [naive::narrow(&k), naive::narrow(&v)]
}

fn append<B: Backend>(io: &mut Io<'_, B>, data: &Qkv) -> Check {
    let [cache_len, _] = cache_lens(data);
    let [k, v] = kv_parts(data);
    let k = io.input("k", &k)?;
    let v = io.input("v", &v)?;
    let mut k_cache = io.inout("k_cache", &vec![UNTOUCHED; cache_len])?;
    let mut v_cache = io.inout("v_cache", &vec![UNTOUCHED; cache_len])?;
    let caches = (&mut k_cache, &mut v_cache);
    B::kv_cache_append_head_major(&mut io.ctx, &k, &v, caches, data.span, data.shape.k())?;
    io.take("k_cache", &k_cache, cache_len)?;
    io.take("v_cache", &v_cache, cache_len)
}

fn append_formula(data: &Qkv) -> Vec<Vec<f64>> {
    kv_parts(data)
        .map(|part| cached(data, &naive::wide(&part), data.shape.k()))
        .to_vec()
}

fn head_to_token<B: Backend>(io: &mut Io<'_, B>, data: &Qkv) -> Check {
    let shape = data.shape.q();
    let src = io.input("src", &q_heads(data))?;
    let mut dst = io.output("dst", shape.len())?;
    B::transpose_head_to_token(&mut io.ctx, &src, &mut dst, shape)?;
    io.take("dst", &dst, shape.len())
}

fn head_to_token_formula(data: &Qkv) -> Vec<Vec<f64>> {
    let HeadsShape {
        tokens,
        heads,
        head_dim,
    } = data.shape.q();
    vec![transposed(
        &naive::wide(&q_heads(data)),
        heads,
        tokens,
        head_dim,
    )]
}

fn token_to_head<B: Backend>(io: &mut Io<'_, B>, data: &Qkv) -> Check {
    let shape = data.shape.q();
    let src = io.input("src", &q_heads(data))?;
    let mut dst = io.output("dst", shape.len())?;
    B::transpose_token_to_head(&mut io.ctx, &src, &mut dst, shape)?;
    io.take("dst", &dst, shape.len())
}

fn token_to_head_formula(data: &Qkv) -> Vec<Vec<f64>> {
    let HeadsShape {
        tokens,
        heads,
        head_dim,
    } = data.shape.q();
    vec![transposed(
        &naive::wide(&q_heads(data)),
        tokens,
        heads,
        head_dim,
    )]
}

const fn shape(tokens: usize, heads: usize, kv_heads: usize, head_dim: usize) -> QkvShape {
    QkvShape {
        tokens,
        heads,
        kv_heads,
        head_dim,
        value_dim: head_dim,
    }
}

const SHAPES: [QkvShape; 7] = [
    shape(0, 2, 1, 8),
    shape(1, 1, 1, 10),
    shape(7, 3, 1, 20),
    shape(5, 4, 2, 24),
    shape(3, 8, 1, 64),
    shape(33, 2, 2, 80),
    shape(2, 16, 2, 128),
];

/// Values wider and narrower than keys.
const UNEQUAL: [QkvShape; 4] = [
    unequal(shape(5, 4, 2, 24), 9),
    unequal(shape(7, 3, 1, 10), 33),
    unequal(shape(3, 2, 2, 192), 128),
    unequal(shape(1, 8, 1, 64), 80),
];

const fn unequal(shape: QkvShape, value_dim: usize) -> QkvShape {
    QkvShape { value_dim, ..shape }
}

fn text(
    QkvShape {
        tokens,
        heads,
        kv_heads,
        head_dim,
        value_dim,
    }: QkvShape,
) -> String {
    let values = match value_dim == head_dim {
        true => String::new(),
        false => format!(", values of {value_dim}"),
    };
    format!("{tokens} tokens, {heads}:{kv_heads} heads of {head_dim}{values}")
}

/// Makes the implementations of an op; a case consumes them.
type MakeImplementations<B> = fn() -> OpImplementations<B, Qkv>;

pub(super) fn cases<B: Backend>(cases: &mut Cases<B>) {
    let act = act_name::<B>();
    let copies: [(&'static str, MakeImplementations<B>); 4] = [
        ("split_qkv", || {
            implementations!(split_qkv, split_qkv_formula)
        }),
        ("kv_cache_append_head_major", || {
            implementations!(append, append_formula)
        }),
        ("transpose_head_to_token", || {
            implementations!(head_to_token, head_to_token_formula)
        }),
        ("transpose_token_to_head", || {
            implementations!(token_to_head, token_to_head_formula)
        }),
    ];
    for (op, implementations) in copies {
        for shape in SHAPES {
            let make = move |rng: &mut Rng| make(rng, shape, KINDS[0], 1.0);
            cases.add(
                label(op, act, Tolerance::EXACT, text(shape)),
                make,
                implementations(),
            );
        }
        let make = |rng: &mut Rng| make(rng, SHAPES[3], KINDS[0], 1.0);
        cases.rejects_short_buffers(
            (op, act),
            make,
            (implementations().run, implementations().reference),
        );
    }
    for shape in UNEQUAL {
        let make = move |rng: &mut Rng| make(rng, shape, KINDS[0], 1.0);
        let case = label("split_qkv", act, Tolerance::EXACT, text(shape));
        cases.add(case, make, implementations!(split_qkv, split_qkv_formula));
        for kind in [KINDS[0], KINDS[4]] {
            let text = format!("{}, {}", text(shape), kind.name);
            transforms(cases, shape, kind, 1.0, &text);
        }
    }
    for kind in KINDS {
        for shape in SHAPES {
            transforms(
                cases,
                shape,
                kind,
                1.0,
                &format!("{}, {}", text(shape), kind.name),
            );
        }
    }
    for (text, scale) in [("large values", 1e3), ("tiny values", 1e-5), ("zeros", 0.0)] {
        transforms(cases, SHAPES[3], KINDS[4], scale, text);
    }
    let make = |rng: &mut Rng| make(rng, SHAPES[3], KINDS[4], 1.0);
    cases.rejects_short_buffers(("qk_norm_rope", act), make, both!(qk_norm_rope));
    cases.rejects_short_buffers(
        ("split_qkv_norm_rope", act),
        make,
        both!(split_qkv_norm_rope),
    );
    cases.rejects_short_buffers(
        ("split_qkv_norm_rope_into_cache", act),
        make,
        both!(into_cache),
    );
}

/// The ops that norm and rotate, on one shape.
fn transforms<B: Backend>(
    cases: &mut Cases<B>,
    shape: QkvShape,
    kind: Kind,
    scale: f32,
    text: &str,
) {
    let case = |op, text: &str| label(op, act_name::<B>(), Tolerance::NORM, text);
    let layouts = [
        (HeadLayout::TokenMajor, "token-major"),
        (HeadLayout::HeadMajor, "head-major"),
    ];
    for (layout, suffix) in layouts {
        let make = move |rng: &mut Rng| Qkv {
            layout,
            ..make(rng, shape, kind, scale)
        };
        let case = case("qk_norm_rope", &format!("{text}, {suffix}"));
        cases.add(
            case,
            make,
            implementations!(qk_norm_rope, qk_norm_rope_formula),
        );
    }
    let make = move |rng: &mut Rng| make(rng, shape, kind, scale);
    let implementations = implementations!(split_qkv_norm_rope, split_qkv_norm_rope_formula);
    cases.add(case("split_qkv_norm_rope", text), make, implementations);
    let implementations = implementations!(into_cache, into_cache_formula);
    cases.add(
        case("split_qkv_norm_rope_into_cache", text),
        make,
        implementations,
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::compare;

    /// Changes a case as a kernel would that reads the contract in another way.
    type Misread = fn(&mut Transform);

    /// A kernel that reads the contract in another way fails at least one case.
    #[test]
    fn misreadings_are_noticed() {
        let misreadings: [(&str, Misread); 6] = [
            ("pairs of the other style", |transform| {
                if let Some(rope) = &mut transform.rope {
                    rope.style = match rope.style {
                        RopeStyle::HalfSplit => RopeStyle::Interleaved,
                        RopeStyle::Interleaved => RopeStyle::HalfSplit,
                    };
                }
            }),
            ("the other direction", |transform| {
                if let Some(rope) = &mut transform.rope {
                    rope.sin.iter_mut().for_each(|sin| *sin = -*sin);
                }
            }),
            ("rows of other tokens", |transform| {
                if let Some(rope) = &mut transform.rope {
                    rope.rows.reverse();
                }
            }),
            ("no norm of queries", |transform| transform.q_norm = None),
            ("no norm of keys", |transform| transform.k_norm = None),
            ("another epsilon", |transform| transform.eps = 1e-3),
        ];
        for (what, misread) in misreadings {
            let noticed = |kind: Kind| {
                let data = make(&mut Rng::new(kind.name, |x| x), SHAPES[3], kind, 1.0);
                let mut changed = data.transform.clone();
                misread(&mut changed);
                let found = transformed(&data.qkv, &changed, data.shape);
                let expected = transformed(&data.qkv, &data.transform, data.shape);
                let differs =
                    |i: usize| compare("x", &found[i], &expected[i], Tolerance::NORM).is_err();
                differs(0) || differs(1)
            };
            assert!(KINDS.into_iter().any(noticed), "nothing notices {what}");
        }
    }
}
