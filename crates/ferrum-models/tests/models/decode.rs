//! `DecodeBackend`: its steps against whole runs of `transformers`, from a prompt that it ran itself
//! and from keys and values that `transformers` computed.

use crate::gpu::gpu;
use crate::support::{expected, fixtures, max_difference, open};
use ferrum_kernels::cpu::CpuBackend;
use ferrum_kernels::reference::ReferenceBackend;
use ferrum_kernels::{Backend, KvF32, LlmBackend};
use ferrum_models::{
    DecodeBackend, Dequantized, KvBlockLayout, KvBlockPart, KvLayout, ModelRunner, RunnerConfig,
    RunnerDecode, load_weights,
};
use ferrum_types::{Error, SeqId, TokenId};
use safetensors::SafeTensors;

/// Fixtures whose outputs hold the keys and values of a prompt.
const MODELS: [&str; 2] = ["llama-bias", "qwen3"];
const PROMPT: usize = 8;

/// A decoder with places for two sequences of at most 40 tokens, which runs three tokens at a time.
fn decoder<B: LlmBackend>(device: &B, name: &str) -> Box<dyn DecodeBackend> {
    let model = open(&fixtures().join(name));
    let config = RunnerConfig {
        context: 40,
        max_seqs: 2,
        max_tokens: 3,
        max_logit_rows: 1,
        kv_tokens: 80,
        kept_states: 0,
        layout: KvLayout::Paged { block_size: 5 },
        profile: false,
    };
    let weights = load_weights::<B, Dequantized>(device, &model, &mut |_, _| ()).unwrap();
    let runner = ModelRunner::<B, KvF32>::new(device, model.spec.clone(), weights, config);
    Box::new(RunnerDecode::new(runner.unwrap()))
}

/// Keys and values of a prompt over all layers.
struct PromptKv {
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
}

impl PromptKv {
    fn of(name: &str) -> Self {
        let bytes = std::fs::read(fixtures().join(name).join("expected.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let layers = |name: &str| {
            let tensor = file.tensor(name).unwrap();
            assert_eq!(tensor.shape()[1], PROMPT);
            let layer = tensor.data().len() / tensor.shape()[0];
            let floats = |b: &[u8]| bytemuck::pod_collect_to_vec(b);
            tensor.data().chunks_exact(layer).map(floats).collect()
        };
        Self {
            keys: layers("prompt_keys"),
            values: layers("prompt_values"),
        }
    }

    /// The bytes of the blocks that hold it; places without a token are NaN.
    fn blocks(&self, layout: &KvBlockLayout) -> Vec<u8> {
        let block_size = layout.block_size;
        let KvBlockPart {
            kv_heads,
            key_dim: head_dim,
            ..
        } = layout.layers[0];
        let mut out = Vec::new();
        for block in 0..PROMPT.div_ceil(block_size) {
            for (keys, values) in self.keys.iter().zip(&self.values) {
                for rows in [keys, values] {
                    for head in 0..kv_heads {
                        for slot in 0..block_size {
                            let token = block * block_size + slot;
                            let at = (token * kv_heads + head) * head_dim;
                            for i in 0..head_dim {
                                let x = rows.get(at + i).copied().unwrap_or(f32::NAN);
                                out.extend(x.to_le_bytes());
                            }
                        }
                    }
                }
            }
        }
        assert_eq!(out.len(), layout.bytes * PROMPT.div_ceil(block_size));
        out
    }
}

/// Feeds `tokens[PROMPT..]` to sequence `seq` and holds the logits against those of the whole run.
fn check_steps(decoder: &mut dyn DecodeBackend, seq: SeqId, tokens: &[TokenId], logits: &[f32]) {
    let vocab = decoder.vocab_size();
    for at in PROMPT..tokens.len() {
        let found = decoder.decode_step(seq, tokens[at]).unwrap();
        let difference = max_difference(&found, &logits[at * vocab..][..vocab]);
        assert!(
            difference <= 1e-4,
            "{}: token {at}: {difference}",
            decoder.name()
        );
    }
}

fn check<B: LlmBackend>(device: &B) {
    for name in MODELS {
        let whole = expected(&fixtures().join(name).join("expected.safetensors"));
        let mut decoder = decoder(device, name);
        let vocab = decoder.vocab_size();

        let own = decoder.prefill(SeqId(1), &whole.tokens[..PROMPT]).unwrap();
        let last = &whole.logits[(PROMPT - 1) * vocab..][..vocab];
        assert!(max_difference(&own, last) <= 1e-4, "{}: {name}", B::NAME);

        let kv = PromptKv::of(name);
        let layout = decoder.kv_block_layout().unwrap();
        decoder
            .init_kv_cache(SeqId(2), PROMPT, &kv.blocks(&layout))
            .unwrap();
        check_steps(&mut *decoder, SeqId(2), &whole.tokens, &whole.logits);
        // The other sequence's cache was left alone.
        check_steps(&mut *decoder, SeqId(1), &whole.tokens, &whole.logits);
    }
}

#[test]
fn steps_equal_a_whole_run_on_the_reference() {
    check(&ReferenceBackend::open(0).unwrap());
}

#[test]
fn steps_equal_a_whole_run_on_the_cpu() {
    check(&CpuBackend::open(0).unwrap());
}

#[test]
fn steps_equal_a_whole_run_on_a_gpu() {
    if let Some(device) = gpu() {
        check(&device);
    }
}

/// Hands a sequence from one device to another after its prompt.
fn hand_over<A: LlmBackend, B: LlmBackend>(from: &A, to: &B) {
    let name = MODELS[1];
    let whole = expected(&fixtures().join(name).join("expected.safetensors"));
    let (mut from, mut to) = (decoder(from, name), decoder(to, name));
    from.prefill(SeqId(3), &whole.tokens[..PROMPT]).unwrap();
    assert_eq!(from.kv_block_layout(), to.kv_block_layout());
    let (tokens, blocks) = from.read_kv_cache(SeqId(3)).unwrap();
    assert_eq!(tokens, PROMPT);
    to.init_kv_cache(SeqId(4), tokens, &blocks).unwrap();
    check_steps(&mut *to, SeqId(4), &whole.tokens, &whole.logits);
}

#[test]
fn a_prompt_that_ran_on_one_backend_goes_on_on_another() {
    let (reference, cpu) = (
        ReferenceBackend::open(0).unwrap(),
        CpuBackend::open(0).unwrap(),
    );
    hand_over(&reference, &cpu);
    hand_over(&cpu, &reference);
    if let Some(gpu) = gpu() {
        hand_over(&cpu, &gpu);
        hand_over(&gpu, &cpu);
    }
}

#[test]
fn sequences_come_and_go() {
    let device = CpuBackend::open(0).unwrap();
    let mut decoder = decoder(&device, MODELS[0]);
    let first = decoder.prefill(SeqId(7), &[1, 2, 3]).unwrap();
    assert!(decoder.has_kv_cache(SeqId(7)) && !decoder.has_kv_cache(SeqId(8)));
    assert!(decoder.release_kv_cache(SeqId(7)));
    assert!(!decoder.release_kv_cache(SeqId(7)) && !decoder.has_kv_cache(SeqId(7)));
    // What the place held before is not seen.
    decoder.prefill(SeqId(8), &[9; 30]).unwrap();
    decoder.release_kv_cache(SeqId(8));
    assert_eq!(decoder.prefill(SeqId(9), &[1, 2, 3]).unwrap(), first);
}

#[test]
fn wrong_calls_are_refused_and_change_nothing() {
    let device = CpuBackend::open(0).unwrap();
    let name = MODELS[0];
    let mut decoder = decoder(&device, name);
    let kv = PromptKv::of(name);
    let blocks = kv.blocks(&decoder.kv_block_layout().unwrap());
    let shape = |found: ferrum_types::Result<()>| matches!(found, Err(Error::Shape { .. }));
    assert!(shape(decoder.init_kv_cache(SeqId(1), PROMPT, &blocks[1..])));
    assert!(shape(decoder.init_kv_cache(SeqId(1), 5, &blocks)));
    assert!(shape(decoder.init_kv_cache(SeqId(1), 11, &blocks)));
    assert!(decoder.init_kv_cache(SeqId(1), usize::MAX, &[]).is_err());
    let invalid = |found: Error| matches!(found, Error::InvalidArgument { .. });
    assert!(invalid(
        decoder.init_kv_cache(SeqId(1), 0, &blocks).unwrap_err()
    ));
    assert!(invalid(decoder.prefill(SeqId(1), &[]).unwrap_err()));
    assert!(invalid(decoder.decode_step(SeqId(1), 0).unwrap_err()));
    assert!(invalid(decoder.read_kv_cache(SeqId(1)).unwrap_err()));
    let overflow = decoder.prefill(SeqId(1), &[0; 41]).unwrap_err();
    assert!(matches!(
        overflow,
        Error::ContextOverflow {
            requested: 41,
            capacity: 40
        }
    ));
    assert!(!decoder.has_kv_cache(SeqId(1)));

    decoder.init_kv_cache(SeqId(1), PROMPT, &blocks).unwrap();
    assert!(invalid(decoder.prefill(SeqId(1), &[0]).unwrap_err()));
    decoder.prefill(SeqId(2), &[0]).unwrap();
    assert!(invalid(decoder.prefill(SeqId(3), &[0]).unwrap_err()));
}
