//! A runner without arithmetic: its KV pool remembers what was written where, and its logits are a
//! function of what a sequence reads there, or a script.

use ferrum_engine::engine::Clock;
use ferrum_engine::{AdapterLoader, Engine, EngineConfig, LoadedAdapter, StepRunner};
use ferrum_kernels::cpu::{CpuBackend, CpuConfig};
use ferrum_kernels::{
    Backend, BackendSample, DeviceSampling, LogitAdjustment, Logprobs, NoToken, RowSampling,
    SampleBatch, SampleShape, Sampled,
};
use ferrum_models::{
    DecoderSpec, KvLayout, Readback, RowOutput, RunnerConfig, StepBatch, StepOutput, Ticket,
};
use ferrum_types::{AdapterId, Error, Result, TokenId};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What a step does instead of ending well.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Fault {
    Error,
    Panic,
}

/// One step as the runner saw it: `(first position, tokens)` of each sequence, by first prompt token.
pub(crate) type Seen = Vec<(TokenId, usize, usize)>;

/// A runner that is made of book-keeping.
pub(crate) struct Scripted {
    spec: DecoderSpec,
    config: RunnerConfig,
    cells: Vec<(u64, TokenId)>,
    rows: Vec<(u64, usize)>,
    hidden: Vec<u64>,
    /// Token for each position of the answer, after a prompt of known length.
    script: Option<(usize, Vec<TokenId>)>,
    fault: Option<(usize, Fault)>,
    /// Chooses among so many tokens, from this one on.
    words: Option<(TokenId, TokenId)>,
    /// Sequences that begin with this token get rows of NaN.
    nan_for: Option<TokenId>,
    nan_rows: Vec<bool>,
    /// What it samples with, if it does.
    samples: Option<CpuBackend>,
    /// What the rows of the last step chose.
    chosen: Vec<i32>,
    ready: StepOutput,
    steps: usize,
    /// By how much a step moves a clock, and each of its tokens.
    cost: Option<(Clock, Duration, Duration)>,
    /// A step waits for a word.
    gate: Option<Receiver<()>>,
    /// Loading an adapter waits for a word.
    adapter_gate: Option<Arc<Mutex<Receiver<()>>>>,
    seen: Arc<Mutex<Vec<Seen>>>,
}

pub(crate) const CONFIG: RunnerConfig = RunnerConfig {
    context: 512,
    max_seqs: 8,
    max_tokens: 32,
    max_logit_rows: 8,
    kv_tokens: 1024,
    kept_states: 0,
    layout: KvLayout::Paged { block_size: 8 },
    profile: false,
};

impl Scripted {
    pub(crate) fn new(config: RunnerConfig) -> Self {
        let spec = crate::demo().spec;
        let pool = config.pool_shape(&spec);
        Self {
            cells: vec![(0, 0); pool.blocks * pool.block_size],
            spec,
            config,
            rows: Vec::new(),
            hidden: Vec::new(),
            script: None,
            fault: None,
            words: None,
            nan_for: None,
            nan_rows: Vec::new(),
            samples: None,
            chosen: Vec::new(),
            ready: StepOutput::default(),
            steps: 0,
            cost: None,
            gate: None,
            adapter_gate: None,
            seen: Arc::default(),
        }
    }

    /// Has rows of so many logits; there is no tokenizer for them.
    pub(crate) fn with_vocab(mut self, size: usize) -> Self {
        self.spec.vocab_size = size;
        self
    }

    /// Answers prompts of `prompt_len` tokens with `tokens`, again and again.
    pub(crate) fn saying(mut self, prompt_len: usize, tokens: Vec<TokenId>) -> Self {
        self.script = Some((prompt_len, tokens));
        self
    }

    /// Answers with so many different tokens, from `first` on.
    pub(crate) fn choosing_of(mut self, first: TokenId, words: TokenId) -> Self {
        self.words = Some((first, words));
        self
    }

    /// Samples, as the CPU does.
    pub(crate) fn sampling(mut self) -> Self {
        let threads = Some(1);
        let config = CpuConfig { threads, isa: None };
        self.samples = Some(CpuBackend::with_config(config).unwrap());
        self
    }

    /// Fails at a step, counted from 0.
    pub(crate) fn failing(mut self, step: usize, fault: Fault) -> Self {
        self.fault = Some((step, fault));
        self
    }

    /// Computes NaN for sequences that begin with `token`.
    pub(crate) fn nan_for(mut self, token: TokenId) -> Self {
        self.nan_for = Some(token);
        self
    }

    /// Waits for a message before each step; all steps run once the sender is dropped.
    pub(crate) fn gated(mut self) -> (Self, Sender<()>) {
        let (sender, gate) = channel();
        self.gate = Some(gate);
        (self, sender)
    }

    /// Waits for a word while it loads an adapter.
    pub(crate) fn gated_adapters(mut self) -> (Self, Sender<()>) {
        let (sender, gate) = channel();
        self.adapter_gate = Some(Arc::new(Mutex::new(gate)));
        (self, sender)
    }

    /// Moves `clock` by `step` in each step, and by `token` for each of its tokens.
    pub(crate) fn costing(mut self, clock: &Clock, step: Duration, token: Duration) -> Self {
        self.cost = Some((clock.clone(), step, token));
        self
    }

    /// What the steps were.
    pub(crate) fn seen(&self) -> Arc<Mutex<Vec<Seen>>> {
        Arc::clone(&self.seen)
    }

    pub(crate) fn start(self, config: EngineConfig) -> Engine {
        let tokenizer = crate::demo_tokenizer();
        let fits = self.spec.vocab_size == crate::demo().spec.vocab_size;
        let runner: Box<dyn StepRunner> = Box::new(self);
        Engine::start(runner, fits.then_some(tokenizer), config).unwrap()
    }

    /// The tokens that the rows of the last step chose; 0 where there is none.
    pub(crate) fn choices(&self) -> Vec<TokenId> {
        let tokens = self.chosen.iter();
        tokens.map(|&token| token.max(0) as TokenId).collect()
    }

    fn token_at(&self, state: u64, position: usize) -> TokenId {
        match &self.script {
            Some((prompt_len, tokens)) => tokens[(position + 1 - prompt_len) % tokens.len()],
            None => {
                let (first, words) = self.words.unwrap_or((0, self.spec.vocab_size as TokenId));
                first + (state >> 33) as TokenId % words
            }
        }
    }
}

fn mix(a: u64, b: u64) -> u64 {
    (a ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15))
        .wrapping_mul(0xbf58_476d_1ce4_e5b9)
        .rotate_left(29)
}

impl Scripted {
    fn step(&mut self, batch: &StepBatch) -> Result<()> {
        if let Some(gate) = &self.gate {
            let _ = gate.recv();
        }
        if let Some((step, fault)) = self.fault
            && step == self.steps
        {
            assert!(fault != Fault::Panic, "a scripted panic");
            return Err(Error::Device {
                backend: "scripted",
                op: "step",
                reason: "the device is lost".into(),
            });
        }
        self.steps += 1;
        if let Some((clock, step, token)) = &self.cost {
            clock.advance(*step + *token * batch.tokens.len() as u32);
        }
        assert!(batch.pending_tokens.is_empty(), "tokens that are not known");
        assert!(batch.tokens.len() <= self.config.max_tokens);
        assert!(batch.logit_rows.len() <= self.config.max_logit_rows);
        let block_size = self.pool().block_size;
        let mut states = Vec::new();
        let mut nan = Vec::new();
        let mut seen = Vec::new();
        for seq in 0..batch.seqs() {
            let table = batch.table(0, seq);
            let cell = |at: usize| table[at / block_size].0 as usize * block_size + at % block_size;
            for row in batch.rows(seq) {
                let (at, token) = (batch.positions[row] as usize, batch.tokens[row]);
                // As attention does, each token looks at all those before it.
                let before = (0..at).fold(7, |sum, i| mix(sum, self.cells[cell(i)].0));
                let state = mix(before, u64::from(token));
                self.cells[cell(at)] = (state, token);
                states.push((state, at));
            }
            let rows = batch.rows(seq);
            let first = self.cells[cell(0)].1;
            nan.resize(states.len(), self.nan_for == Some(first));
            seen.push((first, batch.positions[rows.start] as usize, rows.len()));
        }
        self.rows.clear();
        let wanted = batch.logit_rows.iter().map(|&row| states[row as usize]);
        self.rows.extend(wanted);
        let wanted = batch.logit_rows.iter().chain(&batch.hidden_rows);
        self.nan_rows.clear();
        self.nan_rows.extend(wanted.map(|&row| nan[row as usize]));
        self.hidden.clear();
        let wanted = batch.hidden_rows.iter().map(|&row| states[row as usize].0);
        self.hidden.extend(wanted);
        self.seen.lock().unwrap().push(seen);
        Ok(())
    }

    fn logits(&self, row: usize, logits: &mut [f32]) {
        let (state, at) = self.rows[row];
        for (token, x) in logits.iter_mut().enumerate() {
            *x = (mix(state, token as u64) >> 40) as f32 / (1 << 24) as f32;
        }
        logits[self.token_at(state, at) as usize] = 3.0;
        if self.nan_rows[row] {
            logits.fill(f32::NAN);
        }
    }

    /// Chooses the token of a row, and says what it thinks of it.
    fn sample(
        &self,
        row: usize,
        sampling: (&RowSampling, &[LogitAdjustment], &[u32]),
    ) -> (i32, Option<Logprobs>) {
        let device = self.samples.as_ref().unwrap();
        let vocab = self.spec.vocab_size;
        let mut logits = vec![0.0; vocab];
        self.logits(row, &mut logits);
        let mut logits = device.from_slice(&logits).unwrap();
        let previous = device.from_slice(&self.chosen).unwrap();
        let (settings, changes, mask) = sampling;
        let mut batch = SampleBatch::default();
        let mask = (!mask.is_empty()).then_some(mask);
        batch.push(*settings, changes.iter().copied(), mask);
        let shape = SampleShape { vocab, first: 0 };
        let mut out = Sampled::alloc(device, 1).unwrap();
        let mut ctx = device.new_context().unwrap();
        let mut sampling = DeviceSampling::new(device, batch).unwrap();
        let rows = (&mut logits, shape, &mut sampling, &previous, &mut out);
        CpuBackend::sample_rows(&mut ctx, rows.0, rows.1, rows.2, rows.3, rows.4).unwrap();
        let mut read = |buffer| CpuBackend::to_vec(&mut ctx, buffer).unwrap();
        let (token, ranks) = (read(&out.tokens)[0], read(&out.ranks));
        let logprobs = CpuBackend::to_vec(&mut ctx, &out.logprobs).unwrap();
        let told = settings.logprobs.filter(|_| token >= 0);
        let told = told.map(|top| Logprobs::of_row(token as u32, &ranks, &logprobs, top as usize));
        (token, told)
    }

    /// Fills the requested outputs of the step.
    fn fill(&mut self, batch: &StepBatch, wanted: &[Readback]) {
        let (vocab, dim) = (self.spec.vocab_size, self.spec.hidden_size);
        assert_eq!(wanted.len(), self.rows.len());
        let mut out = std::mem::take(&mut self.ready);
        out.begin(wanted, vocab, self.hidden.len() * dim);
        let (mut chosen, mut sampled) = (Vec::new(), 0);
        for (row, &(state, at)) in self.rows.iter().enumerate() {
            // As backends do, which find no number in NaN.
            let mut token = match self.nan_rows[row] {
                true => NoToken::NotANumber.code(),
                false => self.token_at(state, at) as i32,
            };
            if wanted[row] == Readback::SAMPLED {
                let (found, told) = self.sample(row, batch.sampling.row(sampled));
                token = found;
                sampled += 1;
                if let Some(told) = told {
                    out.set_logprobs(row, told);
                }
            }
            chosen.push(token);
            out.set_token(row, NoToken::or_token(token));
            if let RowOutput::Logits(logits) = out.row(row) {
                self.logits(row, logits);
            }
        }
        assert_eq!(sampled, batch.sampling.len());
        self.chosen = chosen;
        let nan = &self.nan_rows[self.rows.len()..];
        let rows = out.hidden_mut().chunks_exact_mut(dim);
        for ((row, &state), &nan) in rows.zip(&self.hidden).zip(nan) {
            for (i, x) in row.iter_mut().enumerate() {
                *x = (mix(state, i as u64) >> 40) as f32 / (1 << 24) as f32;
            }
            if nan {
                row.fill(f32::NAN);
            }
        }
        self.ready = out;
    }
}

impl StepRunner for Scripted {
    fn adapter_loader(&self) -> AdapterLoader {
        let gate = self.adapter_gate.clone();
        AdapterLoader::new(move |_| {
            if let Some(gate) = &gate {
                let _ = gate.lock().unwrap().recv();
            }
            Ok(LoadedAdapter::new(()))
        })
    }

    fn add_adapter(&mut self, _: AdapterId, adapter: LoadedAdapter) -> Result<()> {
        adapter.take::<()>()
    }

    fn unload_adapter(&mut self, _: AdapterId) -> bool {
        true
    }

    fn backend(&self) -> &'static str {
        "scripted"
    }

    fn spec(&self) -> &DecoderSpec {
        &self.spec
    }

    fn config(&self) -> &RunnerConfig {
        &self.config
    }

    fn samples(&self) -> bool {
        self.samples.is_some()
    }

    fn submit(&mut self, batch: &StepBatch, wanted: &[Readback]) -> Result<Ticket> {
        self.step(batch)?;
        self.fill(batch, wanted);
        Ok(Ticket::new(self.steps as u64))
    }

    fn collect(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<()> {
        assert_eq!(ticket.number(), self.steps as u64);
        std::mem::swap(&mut self.ready, out);
        Ok(())
    }
}
