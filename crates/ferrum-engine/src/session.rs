//! [`Session`]: one sequence on a runner, with its cache kept between calls.

use ferrum_formats::LoraFolder;
use ferrum_kernels::{BackendKvDtype, KvDtypeKind, LlmBackend, PagedKvShape, Span};
use ferrum_models::{DecoderSpec, LogitRows, ModelRunner, RunnerConfig, SeqStep, StepBatch};
use ferrum_types::{AdapterId, BlockId, Error, Result, TokenId};
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// An object-safe view on a [`ModelRunner`]: whole steps, no generics.
pub trait StepRunner: Send {
    /// Name of the backend.
    fn backend(&self) -> &'static str;

    /// What is being run.
    fn spec(&self) -> &DecoderSpec;

    /// The sizes that were allocated for.
    fn config(&self) -> &RunnerConfig;

    /// The KV pool of one layer.
    fn pool(&self) -> PagedKvShape;

    /// See [`ModelRunner::step`].
    fn step(&mut self, batch: &StepBatch) -> Result<()>;

    /// See [`ModelRunner::read_logits`].
    fn read_logits(&mut self, out: &mut [f32]) -> Result<()>;

    /// See [`ModelRunner::read_hidden`].
    fn read_hidden(&mut self, out: &mut [f32]) -> Result<()>;

    /// See [`ModelRunner::read_argmax`].
    fn read_argmax(&mut self, out: &mut [TokenId]) -> Result<()>;

    /// See [`ModelRunner::take_spans`].
    fn take_spans(&mut self) -> Result<Vec<Span>>;

    /// See [`ModelRunner::adapter_loader`].
    fn adapter_loader(&self) -> AdapterLoader;

    /// See [`ModelRunner::add_adapter`].
    fn add_adapter(&mut self, id: AdapterId, adapter: LoadedAdapter) -> Result<()>;

    /// See [`ModelRunner::unload_adapter`].
    fn unload_adapter(&mut self, id: AdapterId) -> bool;
}

impl<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind> StepRunner for ModelRunner<B, K> {
    fn backend(&self) -> &'static str {
        B::NAME
    }

    fn spec(&self) -> &DecoderSpec {
        ModelRunner::spec(self)
    }

    fn config(&self) -> &RunnerConfig {
        ModelRunner::config(self)
    }

    fn pool(&self) -> PagedKvShape {
        ModelRunner::pool(self)
    }

    fn step(&mut self, batch: &StepBatch) -> Result<()> {
        ModelRunner::step(self, batch)
    }

    fn read_logits(&mut self, out: &mut [f32]) -> Result<()> {
        ModelRunner::read_logits(self, out)
    }

    fn read_hidden(&mut self, out: &mut [f32]) -> Result<()> {
        ModelRunner::read_hidden(self, out)
    }

    fn read_argmax(&mut self, out: &mut [TokenId]) -> Result<()> {
        ModelRunner::read_argmax(self, out)
    }

    fn take_spans(&mut self) -> Result<Vec<Span>> {
        ModelRunner::take_spans(self)
    }

    fn adapter_loader(&self) -> AdapterLoader {
        let loader = ModelRunner::adapter_loader(self);
        AdapterLoader::new(move |folder| Ok(LoadedAdapter::new(loader.load(folder)?)))
    }

    fn add_adapter(&mut self, id: AdapterId, adapter: LoadedAdapter) -> Result<()> {
        ModelRunner::add_adapter(self, id, adapter.take()?)
    }

    fn unload_adapter(&mut self, id: AdapterId) -> bool {
        ModelRunner::unload_adapter(self, id)
    }
}

/// A LoRA adapter on its way to the runner that it was loaded for, whose type it has in it.
pub struct LoadedAdapter(Box<dyn Any + Send>);

impl LoadedAdapter {
    /// Hides the type of `adapter`.
    pub fn new<T: Send + 'static>(adapter: T) -> Self {
        Self(Box::new(adapter))
    }

    /// What was given to [`new`](Self::new).
    ///
    /// # Errors
    /// `InvalidArgument` when it is of another type: it was loaded for another runner.
    pub fn take<T: 'static>(self) -> Result<T> {
        let reason = "it was loaded for another runner";
        let adapter = self.0.downcast();
        adapter.map_or_else(|_| Err(Error::invalid("adapter", reason)), |a| Ok(*a))
    }
}

type LoadAdapter = dyn Fn(&LoraFolder) -> Result<LoadedAdapter> + Send + Sync;

/// Loads LoRA adapters for a runner, on any thread and while it makes steps. Clones are the same.
#[derive(Clone)]
pub struct AdapterLoader(Arc<LoadAdapter>);

impl AdapterLoader {
    /// One that loads as `load` does.
    pub fn new(
        load: impl Fn(&LoraFolder) -> Result<LoadedAdapter> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(load))
    }

    /// Reads an adapter, holds it against the model, and brings it to the device.
    ///
    /// # Errors
    /// `Model` names the module that does not fit the model; what the device says.
    pub fn load(&self, folder: &LoraFolder) -> Result<LoadedAdapter> {
        (self.0)(folder)
    }
}

impl fmt::Debug for AdapterLoader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AdapterLoader").finish_non_exhaustive()
    }
}

/// One sequence at a time on a runner. The cache outlives a call, so that a conversation computes only
/// what is new.
pub struct Session {
    runner: Box<dyn StepRunner>,
    batch: StepBatch,
    blocks: Vec<BlockId>,
    /// Tokens in the cache.
    cached: Vec<TokenId>,
    /// Length of the prompt that the cached tokens began with.
    prompt_len: usize,
    adapter: Option<AdapterId>,
    logits: Vec<f32>,
}

impl Session {
    /// A session with an empty cache that uses the runner's whole pool.
    pub fn new(runner: Box<dyn StepRunner>) -> Self {
        let blocks = (0..runner.pool().blocks as u32).map(BlockId).collect();
        let context = runner.config().context;
        Self {
            runner,
            batch: StepBatch::default(),
            blocks,
            cached: Vec::with_capacity(context),
            prompt_len: 0,
            adapter: None,
            logits: Vec::new(),
        }
    }

    /// Runs a LoRA adapter beside the weights from now on. The cache is emptied: it was computed without.
    ///
    /// # Errors
    /// As [`AdapterLoader::load`] and [`StepRunner::add_adapter`].
    pub fn use_adapter(&mut self, folder: &LoraFolder) -> Result<()> {
        let id = AdapterId(0);
        let adapter = self.runner.adapter_loader().load(folder)?;
        self.runner.add_adapter(id, adapter)?;
        self.adapter = Some(id);
        self.cached.clear();
        Ok(())
    }

    /// The runner, whose whole pool is free again.
    pub fn into_runner(self) -> Box<dyn StepRunner> {
        self.runner
    }

    /// Name of the backend.
    pub fn backend(&self) -> &'static str {
        self.runner.backend()
    }

    /// What is being run.
    pub fn spec(&self) -> &DecoderSpec {
        self.runner.spec()
    }

    /// Tokens that a sequence can have.
    pub fn capacity(&self) -> usize {
        let pool = self.runner.pool();
        self.runner
            .config()
            .context
            .min(pool.blocks * pool.block_size)
    }

    /// Tokens in the cache.
    pub fn len(&self) -> usize {
        self.cached.len()
    }

    /// Whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.cached.is_empty()
    }

    /// Starts a sequence with `prompt`, keeping what the cache has in common with it. The logits of
    /// its last token are then ready. Gives the number of tokens that had to be computed.
    ///
    /// # Errors
    /// `InvalidArgument` for an empty prompt; [`Error::ContextOverflow`].
    pub fn prefill(&mut self, prompt: &[TokenId]) -> Result<usize> {
        if prompt.is_empty() {
            return Err(Error::invalid("prefill", "the prompt has no token"));
        }
        let common = self
            .cached
            .iter()
            .zip(prompt)
            .take_while(|(a, b)| a == b)
            .count();
        // Frequencies that depend on the prompt's length make cached keys useless for another prompt.
        let depends = self.spec().rope.scaling.depends_on_length();
        let keep = if depends {
            0
        } else {
            common.min(prompt.len() - 1)
        };
        self.cached.truncate(keep);
        self.prompt_len = prompt.len();
        self.feed(&prompt[keep..], LogitRows::Last, &mut |_, _| Ok(()))?;
        Ok(prompt.len() - keep)
    }

    /// Appends a token. Its logits are then ready.
    ///
    /// # Errors
    /// [`Error::ContextOverflow`].
    pub fn decode(&mut self, token: TokenId) -> Result<()> {
        self.feed(&[token], LogitRows::Last, &mut |_, _| Ok(()))
    }

    /// The logits of the last token, `[vocab]`.
    pub fn logits(&mut self) -> Result<&mut [f32]> {
        self.logits.resize(self.runner.spec().vocab_size, 0.0);
        self.runner.read_logits(&mut self.logits)?;
        Ok(&mut self.logits)
    }

    /// The most likely next token, picked on the device.
    pub fn argmax(&mut self) -> Result<TokenId> {
        let mut best = [0];
        self.runner.read_argmax(&mut best)?;
        Ok(best[0])
    }

    /// See [`ModelRunner::take_spans`].
    ///
    /// # Errors
    /// What the device says.
    pub fn take_spans(&mut self) -> Result<Vec<Span>> {
        self.runner.take_spans()
    }

    /// Runs `tokens` as a new sequence and hands over the logits of every position:
    /// `(first position, [positions, vocab])`, chunk after chunk.
    ///
    /// # Errors
    /// Those of [`prefill`](Self::prefill) and of `each`.
    pub fn score(
        &mut self,
        tokens: &[TokenId],
        each: &mut dyn FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        if tokens.is_empty() {
            return Err(Error::invalid("score", "there is no token"));
        }
        self.cached.clear();
        self.prompt_len = tokens.len();
        self.feed(tokens, LogitRows::All, each)
    }

    /// Appends `tokens` in chunks that fit a step.
    fn feed(
        &mut self,
        tokens: &[TokenId],
        logits: LogitRows,
        each: &mut dyn FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let requested = self.cached.len() + tokens.len();
        if requested > self.capacity() {
            return Err(Error::ContextOverflow {
                requested,
                capacity: self.capacity(),
            });
        }
        let config = self.runner.config();
        let chunk = match logits {
            LogitRows::All => config.max_tokens.min(config.max_logit_rows),
            _ => config.max_tokens,
        };
        for part in tokens.chunks(chunk) {
            let start = self.cached.len();
            let wanted = match logits {
                LogitRows::Last if start + part.len() < requested => LogitRows::None,
                other => other,
            };
            self.batch.clear();
            self.batch.push(SeqStep {
                tokens: part,
                start,
                prompt_len: self.prompt_len,
                blocks: &self.blocks,
                hidden: false,
                logits: wanted,
                adapter: self.adapter,
            })?;
            self.runner.step(&self.batch)?;
            self.cached.extend_from_slice(part);
            if wanted == LogitRows::All {
                self.logits
                    .resize(part.len() * self.runner.spec().vocab_size, 0.0);
                self.runner.read_logits(&mut self.logits)?;
                each(start, &self.logits)?;
            }
        }
        Ok(())
    }
}
