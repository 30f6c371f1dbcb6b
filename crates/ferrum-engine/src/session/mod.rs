//! [`Session`]: one sequence on a runner, with its cache kept between calls.

mod kv;

use crate::StepRunner;
use crate::image_embeddings::PromptImage;
use crate::sampler::{NoToken, Sampler};
use ferrum_formats::LoraFolder;
use ferrum_kernels::{SampleBatch, Span};
use ferrum_models::{
    CacheGroup, DecoderSpec, ImageSpan, LogitRows, Readback, SeqStep, StepBatch, StepOutput,
    image_cut_by,
};
use ferrum_types::{AdapterId, BlockId, Error, Result, StateSlot, TokenId};
use std::ops::Range;

/// One sequence at a time on a runner. The cache outlives a call, so that a conversation computes only
/// what is new.
pub struct Session {
    runner: Box<dyn StepRunner>,
    batch: StepBatch,
    tables: Vec<SessionTable>,
    /// Tokens in the cache.
    cached: Vec<TokenId>,
    /// Images of the prompt that the cached tokens began with.
    images: Vec<ImageSpan>,
    /// The most tokens that were in the cache since it was empty.
    reached: usize,
    /// Length of the prompt that the cached tokens began with.
    prompt_len: usize,
    adapter: Option<AdapterId>,
    /// What is read of each row of a step.
    wanted: Vec<Readback>,
    /// Sampling parameters for the device, if it samples.
    sampling: SampleBatch,
    output: StepOutput,
}

/// The blocks of a session in one cache group. Behind a window they are used again, in turns.
pub(crate) struct SessionTable {
    group: CacheGroup,
    blocks: Vec<BlockId>,
    /// Entries before this one were never filled.
    first: usize,
}

impl SessionTable {
    fn new(group: CacheGroup) -> Self {
        let blocks = (0..group.blocks as u32).map(BlockId).collect();
        Self {
            group,
            blocks,
            first: 0,
        }
    }

    /// The entries that the token after `tokens` others sees, of those that these fill.
    pub(crate) fn needed(&self, tokens: usize) -> Range<usize> {
        let size = self.group.block_size;
        self.group.first_seen(tokens) / size..tokens.div_ceil(size)
    }

    /// Where an entry is.
    fn block(&self, entry: usize) -> BlockId {
        BlockId((entry % self.group.blocks.max(1)) as u32)
    }

    /// Says where the keys are that tokens from `start` up to `end` see or write.
    fn fill(&mut self, start: usize, end: usize) {
        if start == 0 {
            self.first = 0;
        }
        if self.group.window.is_none() {
            return;
        }
        let mut blocks = std::mem::take(&mut self.blocks);
        let size = self.group.block_size;
        let first = self.group.first_seen(start) / size;
        let block = |entry: usize| match entry < first {
            true => BlockId::RELEASED,
            false => self.block(entry),
        };
        blocks.clear();
        blocks.extend((0..end.div_ceil(size)).map(block));
        self.blocks = blocks;
    }

    /// Whether all that the token after `keep` others sees is still there, once `reached` were.
    fn has(&self, keep: usize, reached: usize) -> bool {
        let entry = self.group.first_seen(keep) / self.group.block_size;
        let last = reached.div_ceil(self.group.block_size);
        let there = entry >= self.first && entry + self.group.blocks >= last;
        self.group.window.is_none() || there
    }
}

impl Session {
    /// A session with an empty cache that uses the runner's whole pool.
    pub fn new(runner: Box<dyn StepRunner>) -> Self {
        let tables = runner.cache_groups().into_iter().map(SessionTable::new);
        let tables = tables.collect();
        let context = runner.config().context;
        Self {
            runner,
            batch: StepBatch::default(),
            tables,
            cached: Vec::with_capacity(context),
            images: Vec::new(),
            reached: 0,
            prompt_len: 0,
            adapter: None,
            wanted: Vec::new(),
            sampling: SampleBatch::default(),
            output: StepOutput::default(),
        }
    }

    /// Runs a LoRA adapter beside the weights from now on. The cache is emptied: it was computed without.
    ///
    /// # Errors
    /// As [`AdapterLoader::load`](crate::AdapterLoader::load) and [`StepRunner::add_adapter`].
    pub fn use_adapter(&mut self, folder: &LoraFolder) -> Result<()> {
        let id = AdapterId(0);
        let adapter = self.runner.adapter_loader().load(folder)?;
        self.runner.add_adapter(id, adapter)?;
        self.adapter = Some(id);
        self.clear();
        Ok(())
    }

    /// The runner, whose whole pool is free again.
    pub fn into_runner(self) -> Box<dyn StepRunner> {
        self.runner
    }

    pub(crate) fn runner(&self) -> &dyn StepRunner {
        &*self.runner
    }

    pub(crate) fn runner_mut(&mut self) -> &mut dyn StepRunner {
        &mut *self.runner
    }

    /// Says after which tokens the cache has all that is [needed](Self::needed_blocks), and nothing else.
    pub(crate) fn set_cached(&mut self, tokens: &[TokenId]) {
        self.clear();
        self.cached.extend_from_slice(tokens);
        self.reached = tokens.len();
        for table in &mut self.tables {
            table.first = table.needed(tokens.len()).start;
        }
    }

    /// The blocks of each cache group.
    pub(crate) fn tables(&self) -> &[SessionTable] {
        &self.tables
    }

    /// The blocks of a cache group that the token after `tokens` others sees.
    pub(crate) fn needed_blocks(&self, group: usize, tokens: usize) -> Vec<BlockId> {
        let table = self.tables.get(group);
        let blocks = |table: &SessionTable| {
            let entries = table.needed(tokens);
            entries.map(|entry| table.block(entry)).collect()
        };
        table.map(blocks).unwrap_or_default()
    }

    /// The tokens in the cache.
    pub fn tokens(&self) -> &[TokenId] {
        &self.cached
    }

    /// Name of the backend.
    pub fn backend(&self) -> &'static str {
        self.runner.backend()
    }

    /// The backends with their layers, as in `--layers`; the name of the backend where there is one.
    pub fn placement(&self) -> String {
        self.runner.placement()
    }

    /// What is being run.
    pub fn spec(&self) -> &DecoderSpec {
        self.runner.spec()
    }

    /// Tokens that a sequence can have.
    pub fn capacity(&self) -> usize {
        let config = self.runner.config();
        config.context.min(config.cache_tokens())
    }

    /// Tokens in the cache.
    pub fn len(&self) -> usize {
        self.cached.len()
    }

    /// Whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.cached.is_empty()
    }

    /// Starts a sequence with `prompt`, keeping the common prefix in the cache, and reads the requested outputs of its last
    /// token. Returns the number of tokens that had to be computed.
    ///
    /// # Errors
    /// `InvalidArgument` for an empty prompt; [`Error::ContextOverflow`].
    pub fn prefill(&mut self, prompt: &[TokenId], wanted: Readback) -> Result<usize> {
        self.prefill_with_images((prompt, &[]), wanted)
    }

    /// The same with images in the prompt.
    ///
    /// # Errors
    /// Those of [`prefill`](Self::prefill); `InvalidArgument` for images that a step has no room for.
    pub fn prefill_with_images(
        &mut self,
        (prompt, images): (&[TokenId], &[PromptImage]),
        wanted: Readback,
    ) -> Result<usize> {
        if prompt.is_empty() {
            return Err(Error::invalid("prefill", "the prompt has no token"));
        }
        let common = self
            .cached
            .iter()
            .zip(prompt)
            .take_while(|(a, b)| a == b)
            .count();
        let images: Vec<_> = images.iter().map(PromptImage::span).collect();
        let common = common.min(equal_images(&self.images, &images));
        self.images = images;
        // Frequencies that depend on the prompt's length make cached keys useless for another prompt.
        let depends = self.spec().depends_on_length();
        let keep = if depends {
            0
        } else {
            common.min(prompt.len() - 1)
        };
        // A recurrent state is that of all tokens that were computed, and does not go back.
        let has_states = self.runner.state_slots().is_some();
        let goes_back = !has_states || keep == self.cached.len();
        // Nor is there more of a window than that.
        let there = self.tables.iter().all(|t| t.has(keep, self.reached));
        let keep = if goes_back && there { keep } else { 0 };
        self.cached.truncate(keep);
        self.prompt_len = prompt.len();
        let rows = (LogitRows::Last, wanted, &[][..]);
        self.feed(&prompt[keep..], rows, &mut |_, _| Ok(()))?;
        Ok(prompt.len() - keep)
    }

    /// Appends a token, and reads the requested outputs.
    ///
    /// # Errors
    /// [`Error::ContextOverflow`].
    pub fn decode(&mut self, token: TokenId, wanted: Readback) -> Result<()> {
        let rows = (LogitRows::Last, wanted, &[][..]);
        self.feed(&[token], rows, &mut |_, _| Ok(()))
    }

    /// What has to be read to choose the token after `tokens` with `sampler`, for the next call.
    pub(crate) fn readback(&mut self, sampler: &mut Sampler, tokens: &[TokenId]) -> Readback {
        if sampler.is_plain_greedy(tokens.len() - sampler.prompt_len()) {
            return Readback::GREEDY;
        }
        let vocab = self.spec().vocab_size;
        self.sampling.clear();
        if !self.runner.samples() || !sampler.is_for_devices(None) {
            return Readback::Logits;
        }
        sampler.sample_on_device(tokens, None, None, (vocab, &[]), &mut self.sampling);
        Readback::SAMPLED
    }

    /// The logits of the last token, `[vocab]`; empty if they were not requested.
    pub fn logits(&mut self) -> &mut [f32] {
        self.output.logits_mut()
    }

    /// The next token, which the device sampled; `None` if that was not requested, or there is none.
    pub fn token(&self) -> Option<TokenId> {
        self.chosen().ok()
    }

    /// The next token, which the device was to choose.
    ///
    /// # Errors
    /// Why there is none.
    pub(crate) fn chosen(&self) -> std::result::Result<TokenId, NoToken> {
        let chosen = self.output.tokens().next();
        chosen.map_or(Err(NoToken::NotANumber), |(_, token)| token)
    }

    /// See [`StepRunner::take_spans`].
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
        self.clear();
        self.prompt_len = tokens.len();
        let rows = (LogitRows::All, Readback::Logits, &[][..]);
        let each = &mut |first, output: &StepOutput| each(first, output.logits());
        self.feed(tokens, rows, each)
    }

    /// Runs `tokens` as a new sequence in one step, and returns the logits of every position and the hidden states
    /// [read](StepOutput::aux_hidden) after each of `layers`, `[layers, positions, hidden]`.
    ///
    /// # Errors
    /// Those of [`prefill`](Self::prefill), and of `each`; `InvalidArgument` for more tokens than fit a step, and for a
    /// layer that is not the last of a stage.
    pub fn trace(
        &mut self,
        tokens: &[TokenId],
        layers: &[usize],
        each: &mut dyn FnMut(&StepOutput) -> Result<()>,
    ) -> Result<()> {
        let config = self.runner.config();
        let most = config.max_tokens.min(config.max_logit_rows);
        if tokens.is_empty() || tokens.len() > most {
            let found = tokens.len();
            let reason = format!("found {found} tokens, expected 1 to {most}");
            return Err(Error::invalid("trace", reason));
        }
        self.clear();
        self.prompt_len = tokens.len();
        let rows = (LogitRows::All, Readback::Logits, layers);
        self.feed(tokens, rows, &mut |_, output| each(output))
    }

    /// Empties the cache.
    fn clear(&mut self) {
        self.cached.clear();
        self.images.clear();
    }

    /// Of the next `tokens` tokens those before an image that would be cut.
    fn whole_images(&self, tokens: usize) -> Result<usize> {
        let start = self.cached.len();
        let Some(image) = image_cut_by(&self.images, start + tokens) else {
            return Ok(tokens);
        };
        let before = image.start.saturating_sub(start);
        if before == 0 {
            let found = image.len();
            let reason = format!("an image has {found} tokens, a step has room for {tokens}");
            return Err(Error::invalid("prefill", reason));
        }
        Ok(before)
    }

    /// Appends `tokens` in chunks that fit a step.
    fn feed(
        &mut self,
        tokens: &[TokenId],
        (logits, wanted, layers): (LogitRows, Readback, &[usize]),
        each: &mut dyn FnMut(usize, &StepOutput) -> Result<()>,
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
        let has_states = self.runner.state_slots().is_some();
        let mut rest = tokens;
        while !rest.is_empty() {
            let start = self.cached.len();
            let (part, behind) = rest.split_at(self.whole_images(chunk.min(rest.len()))?);
            rest = behind;
            if start == 0 {
                self.reached = 0;
            }
            let end = start + part.len();
            self.reached = self.reached.max(end);
            self.tables.iter_mut().for_each(|t| t.fill(start, end));
            let rows = match logits {
                LogitRows::Last if start + part.len() < requested => LogitRows::None,
                other => other,
            };
            self.batch.clear();
            self.batch.push(SeqStep {
                tokens: part,
                start,
                prompt_len: self.prompt_len,
                blocks: self.tables.first().map_or(&[], |table| &table.blocks),
                hidden: false,
                logits: rows,
                adapter: self.adapter,
            })?;
            for &layer in layers {
                self.batch.add_aux_hidden_last(layer, rows);
            }
            for (group, table) in self.tables.iter().enumerate().skip(1) {
                self.batch.add_table(group, &table.blocks)?;
            }
            if has_states {
                self.batch.add_state(StateSlot(0));
            }
            for image in &self.images {
                self.batch.add_image(image)?;
            }
            self.wanted.clear();
            self.wanted.resize(self.batch.logit_rows.len(), wanted);
            if self.wanted.contains(&Readback::SAMPLED) {
                std::mem::swap(&mut self.batch.sampling, &mut self.sampling);
            }
            self.runner
                .run(&self.batch, &self.wanted, &mut self.output)?;
            self.cached.extend_from_slice(part);
            if rows == LogitRows::All {
                each(start, &self.output)?;
            }
        }
        Ok(())
    }
}

/// The position up to which prompts have the same images.
fn equal_images(cached: &[ImageSpan], wanted: &[ImageSpan]) -> usize {
    let pairs = cached.iter().zip(wanted);
    let equal = pairs
        .take_while(|(cached, wanted)| cached == wanted)
        .count();
    let others = [cached.get(equal), wanted.get(equal)].into_iter().flatten();
    others.map(|image| image.start).min().unwrap_or(usize::MAX)
}
