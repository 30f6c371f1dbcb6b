//! Draft heads under the engine: answers are those without one, to the bit, and accepted drafts save steps.

use crate::invariance::{ROOMY, assert_same};
use crate::{Answered, collect, greedy, sampled};
use ferrum_engine::engine::EngineStats;
use ferrum_engine::grammar::{Grammar, GrammarCompiler};
use ferrum_engine::{
    BackendKind, BackendOptions, DraftHeadLoad, DraftRunner, Engine, EngineConfig, KvDtype,
    LoadedParts, Placement, Request, Runners, StepRunner,
};
use ferrum_formats::ModelSource;
use ferrum_formats::tokenizer::Tokenizer;
use ferrum_models::{
    AuxHiddenPoint, DraftHead, Model, RunnerConfig, read_eagle3, read_model, read_mtp,
};
use ferrum_types::TokenId;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

fn open(name: &str) -> ModelSource {
    ModelSource::open(fixtures().join(name)).unwrap()
}

/// A model and a head of it.
struct Pair {
    model: Model,
    head: DraftHead,
    folder: PathBuf,
}

impl Pair {
    fn mtp(name: &str) -> Self {
        let model = read_model(open(name)).unwrap();
        let head = read_mtp(&model).unwrap();
        let folder = fixtures().join(name);
        Self {
            model,
            head,
            folder,
        }
    }

    fn eagle3(target: &str, name: &str) -> Self {
        let model = read_model(open(target)).unwrap();
        let head = read_eagle3(open(name), &model).unwrap();
        let folder = fixtures().join(target);
        Self {
            model,
            head,
            folder,
        }
    }

    /// Heads of random weights.
    fn all() -> Vec<Self> {
        vec![
            Self::mtp("drafts/deepseek3-mtp"),
            Self::mtp("drafts/glm4-moe-mtp"),
            Self::mtp("drafts/qwen35-mtp"),
            Self::mtp("drafts/qwen35-moe-mtp"),
            Self::mtp("drafts/qwen3-next-mtp"),
            Self::eagle3("models/qwen3", "drafts/qwen3-eagle3"),
            Self::eagle3("models/llama3-untied", "drafts/llama3-eagle3"),
        ]
    }

    fn tokenizer(&self) -> Arc<Tokenizer> {
        Arc::new(Tokenizer::from_hf_dir(&self.folder).unwrap())
    }

    /// Runners of the model and of its head, on one CPU or on the stages of `layers`.
    fn load(
        &self,
        config: RunnerConfig,
        head: RunnerConfig,
        layers: Option<&str>,
    ) -> (Box<dyn StepRunner>, Box<dyn StepRunner>) {
        let options = BackendOptions {
            threads: Some(2),
            ..BackendOptions::default()
        };
        let layers = layers.map(|layers| layers.parse().unwrap());
        let (kind, model) = (BackendKind::Cpu, &self.model);
        let placement = Placement::for_model(kind, layers.as_ref(), model, options).unwrap();
        let head = DraftHeadLoad {
            head: &self.head,
            config: head,
        };
        let sizes = (config, KvDtype::F32);
        let LoadedParts {
            session,
            draft_head: head,
            ..
        } = placement
            .prepare(model, sizes, None)
            .load(Some(head), &mut |_, _| ())
            .unwrap();
        (session.into_runner(), head.unwrap())
    }

    fn plain(&self, config: RunnerConfig) -> Engine {
        let (runner, _) = self.load(config, config, None);
        Engine::start(runner, None, EngineConfig::default()).unwrap()
    }

    fn drafting(
        &self,
        (config, head): (RunnerConfig, RunnerConfig),
        tokens: usize,
        layers: Option<&str>,
    ) -> Engine {
        let (model, runner) = self.load(config, head, layers);
        let features = Some(self.head.features().clone());
        let draft = Some(DraftRunner {
            runner,
            tokens,
            features,
        });
        Engine::start(Runners { model, draft }, None, EngineConfig::default()).unwrap()
    }
}

fn prompt(seed: usize, len: usize) -> Vec<TokenId> {
    (0..len)
        .map(|i| ((i * i + 7 * i * seed + 3 * seed) % 250) as TokenId)
        .collect()
}

/// Different in length and in how they choose, several with a common beginning, one with three choices.
fn requests() -> Vec<Request> {
    let request = |i: usize| {
        let tokens = [prompt(1, 20 * (i % 3)), prompt(i, 5 + 3 * i)].concat();
        let mut request = match i % 3 {
            0 => greedy(&tokens, 24),
            _ => sampled(&tokens, 24, i as u64),
        };
        request.logprobs = Some(2);
        request.prompt_logprobs = i.is_multiple_of(5).then_some(1);
        if i % 4 == 2 {
            request.generation.sampling.frequency_penalty = 0.5;
            request.generation.sampling.repeat_penalty = 1.1;
            request.generation.sampling.dry.multiplier = 0.8;
        }
        request.n = if i == 7 { 3 } else { 1 };
        request
    };
    (0..10).map(request).collect()
}

fn ask_all(engine: &Engine, change: impl Fn(&mut Request)) -> Vec<Answered> {
    let submit = |mut request| {
        change(&mut request);
        engine.handle().submit(request).unwrap()
    };
    let streams: Vec<_> = requests().into_iter().map(submit).collect();
    streams.into_iter().map(collect).collect()
}

/// Room for all, also for the rows of drafts.
const ROOM: RunnerConfig = RunnerConfig {
    max_logit_rows: 80,
    kv_tokens: 16 * 160,
    kept_states: 6,
    ..ROOMY
};

#[test]
fn heads_change_how_many_steps_there_are_and_nothing_else() {
    // Room for some sequences, for little of a prompt, and for few rows.
    let small = RunnerConfig {
        context: 70,
        max_seqs: 5,
        max_tokens: 9,
        max_logit_rows: 3,
        kv_tokens: 160,
        ..ROOM
    };
    let tight = RunnerConfig {
        kv_tokens: 200,
        max_tokens: 20,
        ..ROOM
    };
    for pair in Pair::all() {
        let name = pair.folder.display().to_string();
        let expected = ask_all(&pair.plain(ROOM), |_| ());
        for (config, head) in [(ROOM, ROOM), (ROOM, small), (tight, ROOM), (tight, small)] {
            let engine = pair.drafting((config, head), 4, None);
            for round in 0..2 {
                let how = format!("of {name} with {head:?}, round {round}");
                assert_same(&ask_all(&engine, |_| ()), &expected, &how);
            }
            let drafted = engine.handle().stats().draft_tokens;
            let how = format!("of {name}, and lookup");
            let found = ask_all(&engine, |request| request.draft_tokens = 3);
            assert_same(&found, &expected, &how);
            let stats = engine.handle().stats();
            assert!(drafted > 0 && stats.cached_tokens > 0, "{name}: {stats:?}");
            assert_eq!(config == tight, stats.preemptions > 0, "{name}: {stats:?}");
        }
    }
}

#[test]
fn heads_beside_stages_draft_the_same() {
    let pair = Pair::mtp("drafts/deepseek3-mtp");
    let expected = ask_all(&pair.plain(ROOM), |_| ());
    let engine = pair.drafting((ROOM, ROOM), 3, Some("cpu:0-0,cpu:1-1"));
    assert_same(&ask_all(&engine, |_| ()), &expected, "on stages");
    assert!(engine.handle().stats().draft_tokens > 0);

    let pair = Pair::mtp("drafts/qwen35-mtp");
    let expected = ask_all(&pair.plain(ROOM), |_| ());
    let engine = pair.drafting((ROOM, ROOM), 3, Some("cpu:0-0,cpu:1-2"));
    assert_same(&ask_all(&engine, |_| ()), &expected, "on stages");
    assert!(engine.handle().stats().draft_tokens > 0);

    let pair = Pair::eagle3("models/qwen3", "drafts/qwen3-eagle3");
    let last = pair.model.spec.layers.len() - 1;
    let expected = ask_all(&pair.plain(ROOM), |_| ());
    let engine = pair.drafting((ROOM, ROOM), 3, Some(&format!("cpu:0-1,cpu:2-{last}")));
    assert_same(&ask_all(&engine, |_| ()), &expected, "on stages");
    assert!(engine.handle().stats().draft_tokens > 0);
}

#[test]
fn grammars_hold_drafts_of_heads() {
    for pair in [
        Pair::mtp("drafts/deepseek3-mtp"),
        Pair::eagle3("models/qwen3", "drafts/qwen3-eagle3"),
    ] {
        let tokenizer = pair.tokenizer();
        let compiler = GrammarCompiler::new(Arc::clone(&tokenizer), tokenizer.vocab_size());
        let ask = |engine: &Engine, seed: u64| {
            let mut request = sampled(&prompt(3, 12), 30, seed);
            let grammar = Grammar::Regex("[a-c]{10}-[0-9]{8}".into());
            request.grammar = Some(compiler.compile(&grammar).unwrap());
            collect(engine.handle().submit(request).unwrap())
        };
        let (plain, drafting) = (pair.plain(ROOM), pair.drafting((ROOM, ROOM), 4, None));
        for seed in 0..4 {
            let (expected, found) = (ask(&plain, seed), ask(&drafting, seed));
            assert!(found.failed.is_none(), "{found:?}");
            assert_eq!(found.choices, expected.choices, "{seed}");
        }
    }
}

/// A model whose next token is a permutation of the last one, and heads that know it: what they draft is always right, so
/// there are fewer steps than tokens, whatever was found in the cache.
#[test]
fn a_head_that_is_right_saves_steps() {
    let cycles = [
        (Pair::mtp("drafts/glm4-moe-cycle"), 4),
        (Pair::mtp("drafts/qwen35-cycle"), 4),
        // Its second draft token is that of another position.
        (
            Pair::eagle3(
                "drafts/llama-cycle-eagle3-target",
                "drafts/llama-cycle-eagle3",
            ),
            1,
        ),
    ];
    for (pair, tokens) in cycles {
        let plain = pair.plain(ROOM);
        let prompt: Vec<_> = prompt(1, 40).into_iter().map(|t| t % 30).collect();
        let expected = collect(plain.handle().submit(greedy(&prompt, 30)).unwrap());
        for cached in [false, true] {
            // Another engine, as drafts stop while they take longer than steps, which may be so in a model as small as this.
            let engine = pair.drafting((ROOM, ROOM), tokens, None);
            if cached {
                collect(engine.handle().submit(greedy(&prompt, 1)).unwrap());
            }
            let before = after(&engine, u64::from(cached));
            let found = collect(engine.handle().submit(greedy(&prompt, 30)).unwrap());
            assert_eq!(found.choices, expected.choices);
            assert_eq!(found.usage.unwrap().cached_tokens > 0, cached);
            let stats = after(&engine, before.generated_tokens + 30);
            let (drafted, right) = (stats.draft_tokens, stats.accepted_tokens);
            assert!(drafted > 0 && right == drafted, "{stats:?}");
            // Each token needs a step of its own but for those that were drafted. A prompt is cut where a state is kept.
            let cut = !cached && ROOM.state_slots(&pair.model.spec).is_some();
            let steps = 30 + u64::from(cut) - right;
            assert_eq!(stats.steps - before.steps, steps, "{stats:?}");
        }
    }
}

/// What an engine did when the step has ended that gave its last token, of so many.
fn after(engine: &Engine, tokens: u64) -> EngineStats {
    loop {
        let stats = engine.handle().stats();
        if stats.generated_tokens == tokens {
            return stats;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn heads_of_other_models_are_refused() {
    let pair = Pair::eagle3("models/qwen3", "drafts/qwen3-eagle3");
    let refusal = |change: &dyn Fn(&mut ferrum_models::DraftFeatures)| {
        let (model, runner) = pair.load(ROOM, ROOM, None);
        let mut features = pair.head.features().clone();
        change(&mut features);
        let draft = Some(DraftRunner {
            runner,
            tokens: 4,
            features: Some(features),
        });
        let refused = Engine::start(Runners { model, draft }, None, EngineConfig::default());
        refused.err().unwrap().to_string()
    };
    let found = refusal(&|features| features.target[1] = AuxHiddenPoint::Layer(77));
    assert!(found.contains("reads Layer(77) of a model with"), "{found}");
    let found = refusal(&|features| features.tokens = Some(vec![3, 900].into()));
    assert!(
        found.contains("a token 900, the model a vocabulary of"),
        "{found}"
    );
    let found = refusal(&|features| features.tokens = None);
    assert!(found.contains("a vocabulary of 101 tokens"), "{found}");
}
