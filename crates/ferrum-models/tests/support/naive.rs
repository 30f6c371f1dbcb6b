//! A decoder in f64 loops, straight from the formulas, and checkpoints that no family writes: layers that differ in the
//! widths of their heads, share keys and values, or are short convolutions.

use ferrum_formats::ModelSource;
use ferrum_models::{AttentionSpec, DecoderSpec, GqaSpec, Model, ShortConvSpec, read_model};
use ferrum_types::TokenId;
use safetensors::tensor::{Dtype, TensorView, serialize};
use std::collections::BTreeMap;
use std::path::Path;

pub(crate) const VOCAB: usize = 37;
const HIDDEN: usize = 24;
const INNER: usize = 20;
const EPS: f32 = 1e-6;
const THETA: f32 = 10000.0;

/// What a layer's attention is.
#[derive(Clone, Copy)]
pub(crate) struct Attention {
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) value_dim: usize,
    pub(crate) window: Option<usize>,
    pub(crate) shared_kv: Option<usize>,
    /// Taps of a short convolution, which the layer has instead.
    pub(crate) conv: Option<usize>,
}

pub(crate) const HEAD_DIM: usize = 8;

pub(crate) const PLAIN: Attention = Attention {
    heads: 4,
    kv_heads: 2,
    value_dim: HEAD_DIM,
    window: None,
    shared_kv: None,
    conv: None,
};

/// A short convolution over so many tokens.
pub(crate) const fn short_conv(taps: usize) -> Attention {
    Attention {
        conv: Some(taps),
        ..PLAIN
    }
}

/// A random decoder, Qwen3-like.
pub(crate) struct Naive {
    layers: Vec<Attention>,
    tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

/// Numbers between -1 and 1.
fn noise(seed: &mut u64) -> f32 {
    *seed = seed
        .wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 40) as f32 / (1 << 23) as f32 - 1.0
}

impl Naive {
    pub(crate) fn new(layers: &[Attention]) -> Self {
        let mut tensors = BTreeMap::new();
        let mut seed = 7;
        let mut add = |name: String, shape: &[usize]| {
            let len = shape.iter().product();
            let norm = name.ends_with("norm.weight");
            let size = if norm { 0.2 } else { 0.4 };
            let values = (0..len).map(|_| f32::from(u8::from(norm)) + size * noise(&mut seed));
            tensors.insert(name, (shape.to_vec(), values.collect::<Vec<_>>()));
        };
        add("model.embed_tokens.weight".into(), &[VOCAB, HIDDEN]);
        add("lm_head.weight".into(), &[VOCAB, HIDDEN]);
        add("model.norm.weight".into(), &[HIDDEN]);
        for (i, layer) in layers.iter().enumerate() {
            let mut add = |name: &str, shape: &[usize]| {
                add(format!("model.layers.{i}.{name}.weight"), shape);
            };
            add("input_layernorm", &[HIDDEN]);
            add("post_attention_layernorm", &[HIDDEN]);
            add("mlp.gate_proj", &[INNER, HIDDEN]);
            add("mlp.up_proj", &[INNER, HIDDEN]);
            add("mlp.down_proj", &[HIDDEN, INNER]);
            if let Some(taps) = layer.conv {
                add("conv.in_proj", &[3 * HIDDEN, HIDDEN]);
                add("conv.conv", &[HIDDEN, 1, taps]);
                add("conv.out_proj", &[HIDDEN, HIDDEN]);
                continue;
            }
            add("self_attn.q_proj", &[layer.heads * HEAD_DIM, HIDDEN]);
            add("self_attn.q_norm", &[HEAD_DIM]);
            if layer.shared_kv.is_none() {
                add("self_attn.k_proj", &[layer.kv_heads * HEAD_DIM, HIDDEN]);
                add("self_attn.k_norm", &[HEAD_DIM]);
                let rows = layer.kv_heads * layer.value_dim;
                add("self_attn.v_proj", &[rows, HIDDEN]);
            }
            let cols = layer.heads * layer.value_dim;
            add("self_attn.o_proj", &[HIDDEN, cols]);
        }
        Self {
            layers: layers.to_vec(),
            tensors,
        }
    }

    /// Writes it as a checkpoint and opens that, with the spec of these layers.
    pub(crate) fn open(&self, dir: &Path) -> Model {
        let config = serde_json::json!({
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": self.layers.len(),
            "num_attention_heads": PLAIN.heads,
            "num_key_value_heads": PLAIN.kv_heads,
            "head_dim": HEAD_DIM,
            "vocab_size": VOCAB,
            "max_position_embeddings": 128,
            "rms_norm_eps": EPS,
            "rope_theta": THETA,
            "hidden_act": "silu",
            "tie_word_embeddings": false,
        });
        std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
        let bytes =
            |values: &[f32]| -> Vec<u8> { values.iter().flat_map(|x| x.to_le_bytes()).collect() };
        let data: Vec<_> = self
            .tensors
            .iter()
            .map(|(name, (shape, values))| (name, shape.clone(), bytes(values)))
            .collect();
        let views = data.iter().map(|(name, shape, bytes)| {
            let view = TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap();
            (name.as_str(), view)
        });
        let file = serialize(views, None).unwrap();
        std::fs::write(dir.join("model.safetensors"), file).unwrap();
        let mut model = read_model(ModelSource::open(dir).unwrap()).unwrap();
        for (spec, layer) in model.spec.layers.iter_mut().zip(&self.layers) {
            let AttentionSpec::Gqa(gqa) = &spec.attention else {
                panic!("a layer without heads");
            };
            let gqa = GqaSpec {
                heads: layer.heads,
                kv_heads: layer.kv_heads,
                value_dim: layer.value_dim,
                sliding_window: layer.window,
                shared_kv: layer.shared_kv,
                ..gqa.clone()
            };
            spec.attention = match layer.conv {
                Some(kernel) => AttentionSpec::ShortConv(ShortConvSpec {
                    channels: HIDDEN,
                    kernel,
                    bias: false,
                }),
                None => AttentionSpec::Gqa(gqa),
            };
        }
        model.spec.validate().unwrap();
        model
    }

    fn values(&self, name: &str) -> &[f32] {
        &self.tensors[name].1
    }

    /// `weight · x` of each row.
    fn map(&self, name: &str, rows: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let weight = self.values(name);
        let product = |x: &Vec<f64>| {
            let dot = |w: &[f32]| w.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum();
            weight.chunks_exact(x.len()).map(dot).collect()
        };
        rows.iter().map(product).collect()
    }

    fn norm(&self, name: &str, row: &[f64]) -> Vec<f64> {
        let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
        let factor = 1.0 / (mean + f64::from(EPS)).sqrt();
        let weight = self.values(name).iter();
        row.iter()
            .zip(weight)
            .map(|(x, w)| x * factor * f64::from(*w))
            .collect()
    }

    /// Heads of each row, normed and rotated to its position.
    fn heads(&self, norm: &str, rows: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let half = HEAD_DIM / 2;
        let turn = |position: usize, head: &[f64]| {
            let mut head = self.norm(norm, head);
            for i in 0..half {
                let exponent = -(2.0 * i as f64) / HEAD_DIM as f64;
                let (sin, cos) = (position as f64 * f64::from(THETA).powf(exponent)).sin_cos();
                let (a, b) = (head[i], head[i + half]);
                (head[i], head[i + half]) = (a * cos - b * sin, b * cos + a * sin);
            }
            head
        };
        let row = |(position, row): (usize, &Vec<f64>)| {
            let heads = row.chunks_exact(HEAD_DIM);
            heads.flat_map(|head| turn(position, head)).collect()
        };
        rows.iter().enumerate().map(row).collect()
    }

    fn feed_forward(&self, index: usize, stream: &mut [Vec<f64>]) {
        let at = |name: &str| format!("model.layers.{index}.{name}.weight");
        let norm = at("post_attention_layernorm");
        let x: Vec<_> = stream.iter().map(|x| self.norm(&norm, x)).collect();
        let gate = self.map(&at("mlp.gate_proj"), &x);
        let up = self.map(&at("mlp.up_proj"), &x);
        let gated = gate.iter().zip(&up).map(|(gate, up)| {
            let pairs = gate.iter().zip(up);
            pairs.map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect()
        });
        let gated: Vec<_> = gated.collect();
        add(stream, &self.map(&at("mlp.down_proj"), &gated));
    }

    /// `c · conv(b · x)` of the projection to `[b | c | x]`.
    fn short_conv(
        &self,
        input: &str,
        (kernel, taps): (&str, usize),
        rows: &[Vec<f64>],
    ) -> Vec<Vec<f64>> {
        let parts = self.map(input, rows);
        let kernel = self.values(kernel);
        let gated = |t: usize, c: usize| parts[t][c] * parts[t][2 * HIDDEN + c];
        let row = |t: usize| {
            let channel = |c: usize| {
                let sum: f64 = (0..taps.min(t + 1))
                    .map(|back| {
                        let weight = kernel[c * taps + taps - 1 - back];
                        f64::from(weight) * gated(t - back, c)
                    })
                    .sum();
                parts[t][HIDDEN + c] * sum
            };
            (0..HIDDEN).map(channel).collect()
        };
        (0..rows.len()).map(row).collect()
    }

    /// Logits `[tokens, vocab]`.
    pub(crate) fn logits(&self, tokens: &[TokenId]) -> Vec<f32> {
        let table = self.values("model.embed_tokens.weight");
        let row = |&t: &TokenId| table[t as usize * HIDDEN..][..HIDDEN].iter();
        let wide = |t| row(t).map(|x| f64::from(*x)).collect::<Vec<_>>();
        let mut stream: Vec<_> = tokens.iter().map(wide).collect();
        let mut kept: Vec<[Vec<Vec<f64>>; 2]> = Vec::new();
        for (index, layer) in self.layers.iter().enumerate() {
            let at = |name: &str| format!("model.layers.{index}.{name}.weight");
            let normed = |stream: &[Vec<f64>], name: &str| -> Vec<_> {
                stream.iter().map(|x| self.norm(&at(name), x)).collect()
            };
            let x = normed(&stream, "input_layernorm");
            if let Some(taps) = layer.conv {
                kept.push(Default::default());
                let mixed = self.short_conv(&at("conv.in_proj"), (&at("conv.conv"), taps), &x);
                add(&mut stream, &self.map(&at("conv.out_proj"), &mixed));
                self.feed_forward(index, &mut stream);
                continue;
            }
            let q = self.map(&at("self_attn.q_proj"), &x);
            let q = self.heads(&at("self_attn.q_norm"), &q);
            let kv = match layer.shared_kv {
                Some(owner) => kept[owner].clone(),
                None => {
                    let k = self.map(&at("self_attn.k_proj"), &x);
                    let k = self.heads(&at("self_attn.k_norm"), &k);
                    [k, self.map(&at("self_attn.v_proj"), &x)]
                }
            };
            let mixed = attend(*layer, &q, &kv);
            kept.push(kv);
            add(&mut stream, &self.map(&at("self_attn.o_proj"), &mixed));
            self.feed_forward(index, &mut stream);
        }
        let last = |x: &Vec<f64>| self.norm("model.norm.weight", x);
        let rows: Vec<_> = stream.iter().map(last).collect();
        let logits = self.map("lm_head.weight", &rows);
        logits.concat().iter().map(|x| *x as f32).collect()
    }
}

fn add(stream: &mut [Vec<f64>], delta: &[Vec<f64>]) {
    for (row, delta) in stream.iter_mut().zip(delta) {
        row.iter_mut().zip(delta).for_each(|(x, d)| *x += d);
    }
}

/// Causal attention of each query over the keys of its window.
fn attend(layer: Attention, q: &[Vec<f64>], [k, v]: &[Vec<Vec<f64>>; 2]) -> Vec<Vec<f64>> {
    let dim = layer.value_dim;
    let row = |i: usize| {
        let first = layer.window.map_or(0, |w| (i + 1).saturating_sub(w));
        let head = |head: usize| {
            let kv = head / (layer.heads / layer.kv_heads);
            let query = &q[i][head * HEAD_DIM..][..HEAD_DIM];
            let weight = |j: usize| {
                let key = &k[j][kv * HEAD_DIM..][..HEAD_DIM];
                let dot: f64 = query.iter().zip(key).map(|(q, k)| q * k).sum();
                (dot / (HEAD_DIM as f64).sqrt()).exp()
            };
            let weights: Vec<_> = (first..=i).map(weight).collect();
            let total: f64 = weights.iter().sum();
            (0..dim).map(move |d| {
                let values = (first..=i).map(|j| v[j][kv * dim + d]);
                weights.iter().zip(values).map(|(w, v)| w * v).sum::<f64>() / total
            })
        };
        (0..layer.heads).flat_map(head).collect()
    };
    (0..q.len()).map(row).collect()
}

/// Random tokens.
pub(crate) fn tokens(count: usize) -> Vec<TokenId> {
    let mut seed = 3;
    (0..count)
        .map(|_| ((noise(&mut seed) + 1.0) * 0.5 * VOCAB as f32) as TokenId % VOCAB as TokenId)
        .collect()
}

/// The attention of a layer.
pub(crate) fn gqa(spec: &mut DecoderSpec, layer: usize) -> &mut GqaSpec {
    match &mut spec.layers[layer].attention {
        AttentionSpec::Gqa(gqa) => gqa,
        AttentionSpec::Mla(_) | AttentionSpec::ShortConv(_) | AttentionSpec::Linear(_) => {
            panic!("a layer without heads")
        }
    }
}
