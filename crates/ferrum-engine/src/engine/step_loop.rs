//! The engine's thread: commands, a step, events, and again.

use super::adapters::AdapterState;
use super::answer::{Answer, AnswerText, Chosen, Ending};
use super::draft::{Ask, DraftModel};
use super::lookup::PromptLookup;
use super::pace::{self, StepPace};
use super::pooling::{Pool, Pooling};
use super::request::{EngineError, Event, RequestId, StopMatch, Submission, Usage};
use super::stats::{DraftCounts, Progress};
use super::{Command, Phase, Shared};
use crate::grammar::MaskThreads;
use crate::pool::{BlockTable, CacheSalt};
use crate::sampler::{has_number, logprobs};
use crate::scheduler::{NewSequence, Scheduler, StepPlan, Work};
use crate::{FinishReason, StepRunner};
use ferrum_formats::tokenizer::Tokenizer;
use ferrum_models::{LogitRows, SeqStep, StepBatch};
use ferrum_types::{AdapterId, Error, Result, SeqId, TokenId};
use std::collections::{BTreeMap, HashMap};
use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::Sender;

/// A request that has not ended.
pub(super) struct Open {
    events: Sender<Event>,
    came: Duration,
    /// Told to whoever waits for it.
    progress: Arc<Progress>,
    /// Choices that have not ended.
    seqs: Vec<SeqId>,
    pub(super) adapter: Option<AdapterId>,
    stop_tokens: Vec<TokenId>,
    usage: Usage,
    prompt_logprobs: Option<usize>,
    /// Prompt positions whose logits were used.
    prompt_rows: usize,
}

/// Everything on the engine's thread.
pub(super) struct StepLoop<'a> {
    pub(super) runner: Box<dyn StepRunner>,
    draft: Option<DraftModel>,
    tokenizer: Option<&'a Tokenizer>,
    pub(super) scheduler: Scheduler,
    pub(super) shared: &'a Shared,
    inbox: &'a Receiver<Command>,
    pub(super) open: HashMap<RequestId, Open>,
    /// On the runner.
    pub(super) adapters: BTreeMap<AdapterId, AdapterState>,
    pub(super) answers: HashMap<SeqId, Answer<'a>>,
    next_seq: u64,
    plan: StepPlan,
    batch: StepBatch,
    pub(super) logits: Vec<f32>,
    /// By rows of logits: what was chosen ahead.
    pub(super) chosen: Vec<Option<Chosen>>,
    /// There once a request has a grammar.
    mask_threads: Option<MaskThreads>,
    hidden: Vec<f32>,
    /// By rows: the most likely tokens, if the device found them and nothing else is asked for.
    pub(super) best: Vec<TokenId>,
    probe_wanted: bool,
    last_check: Option<Duration>,
    generated: u64,
    model_time: Duration,
    /// Tokens that were guessed, and those that were right.
    drafted: (u64, u64),
    drafts: DraftCounts,
    pace: StepPace,
}

impl<'a> StepLoop<'a> {
    pub(super) fn new(
        (runner, draft): (Box<dyn StepRunner>, Option<DraftModel>),
        tokenizer: Option<&'a Tokenizer>,
        scheduler: Scheduler,
        shared: &'a Shared,
        inbox: &'a Receiver<Command>,
    ) -> Self {
        Self {
            runner,
            draft,
            tokenizer,
            scheduler,
            shared,
            inbox,
            open: HashMap::new(),
            adapters: BTreeMap::new(),
            answers: HashMap::new(),
            next_seq: 0,
            plan: StepPlan::default(),
            batch: StepBatch::default(),
            logits: Vec::new(),
            chosen: Vec::new(),
            mask_threads: None,
            hidden: Vec::new(),
            best: Vec::new(),
            probe_wanted: false,
            last_check: None,
            generated: 0,
            model_time: Duration::ZERO,
            drafted: (0, 0),
            drafts: DraftCounts::default(),
            pace: StepPace::new(shared.config.step_time),
        }
    }

    /// Runs until it is told to stop.
    pub(super) fn run(&mut self) -> Result<()> {
        self.update_stats(None);
        while self.read_commands()?.is_continue() {
            let now = self.shared.config.clock.now();
            while let Some(id) = self.scheduler.overdue(now) {
                self.finish(id, FinishReason::Deadline.into());
            }
            if !self.scheduler.is_empty() {
                self.step()?;
            } else if self.probe_wanted {
                self.probe()?;
            }
        }
        Ok(())
    }

    /// Carries out what has been asked, and waits for more when there is nothing else to do.
    fn read_commands(&mut self) -> Result<ControlFlow<()>> {
        loop {
            let command = match self.inbox.try_recv() {
                Ok(command) => command,
                Err(TryRecvError::Disconnected) => return Ok(ControlFlow::Break(())),
                Err(TryRecvError::Empty) => {
                    if !self.scheduler.is_empty() || self.probe_wanted {
                        return Ok(ControlFlow::Continue(()));
                    }
                    self.rest()?;
                    if *self.shared.phase.borrow() == Phase::Draining {
                        return Ok(ControlFlow::Break(()));
                    }
                    match self.inbox.recv() {
                        Ok(command) => command,
                        Err(_) => return Ok(ControlFlow::Break(())),
                    }
                }
            };
            match command {
                Command::Submit(submission) => self.open(&submission),
                Command::Cancel(id) => self.cancel(id),
                Command::AddAdapter(new) => self.add_adapter(*new),
                Command::RetireAdapter(id) => self.retire_adapter(id),
                Command::Probe(asked) => {
                    self.shared.pulse.work_came(asked);
                    self.probe_wanted = true;
                }
                Command::Drain => {}
                Command::Shutdown => return Ok(ControlFlow::Break(())),
            }
        }
    }

    /// Nothing to do: a good time to look at the books.
    fn rest(&mut self) -> Result<()> {
        let now = self.shared.config.clock.now();
        let due = |last: Duration| now.saturating_sub(last) >= self.shared.config.check_every;
        if self.last_check.is_none_or(due) {
            self.last_check = Some(now);
            let fault = |fault: crate::pool::PoolFault| Error::invalid("engine", fault.to_string());
            self.scheduler.check().map_err(fault)?;
        }
        self.update_stats(None);
        self.shared.pulse.idle();
        Ok(())
    }

    /// Makes sequences of a request.
    fn open(&mut self, submission: &Submission) {
        let request = &submission.request;
        // The handle said so before, and an engine that was about to rest may have wiped it out.
        self.shared.pulse.work_came(submission.came);
        let open = Open {
            events: submission.events.clone(),
            came: submission.came,
            progress: Arc::clone(&submission.progress),
            seqs: Vec::with_capacity(request.n),
            adapter: request.adapter,
            stop_tokens: request.generation.stop_tokens.clone(),
            usage: Usage {
                prompt_tokens: request.prompt.len(),
                ..Usage::default()
            },
            prompt_logprobs: request.prompt_logprobs,
            prompt_rows: 0,
        };
        self.open.insert(submission.id, open);
        if let Err(error) = self.find_adapter(request) {
            self.shared.queued.fetch_sub(request.n, Ordering::AcqRel);
            return self.fail_request(submission.id, error);
        }
        for choice in 0..request.n {
            if let Err(error) = self.add_choice(submission, choice) {
                // All was checked at the door, so this is a fault of the engine's; the request is told.
                let missing = request.n - choice;
                self.shared.queued.fetch_sub(missing, Ordering::AcqRel);
                let failed = EngineError::Failed(error.to_string());
                self.fail_request(submission.id, failed);
                return;
            }
        }
    }

    /// Makes a sequence of one choice. The first computes the prompt, the others wait for it.
    fn add_choice(&mut self, submission: &Submission, choice: usize) -> Result<()> {
        let (id, request) = (submission.id, &submission.request);
        let generation = &request.generation;
        let sampler = generation.sampler(request.prompt.len(), choice as u64)?;
        let spec = self.runner.spec();
        let (depends, dim) = (spec.rope.scaling.depends_on_length(), spec.hidden_size);
        let siblings = self.open.get(&id).map(|open| &open.seqs);
        let seq = SeqId(self.next_seq);
        self.next_seq += 1;
        self.scheduler.add(NewSequence {
            id: seq,
            prompt: request.prompt.clone(),
            priority: request.priority,
            deadline: submission.deadline,
            salt: CacheSalt {
                tenant: request.tenant.as_deref().map(Into::into),
                prompt_len: depends.then_some(request.prompt.len()),
                adapter: request.adapter,
                private: (!self.shared.config.prefix_cache).then_some(id.0),
            },
            prompt_logits: match request.pooling {
                Some(pooling) => pooling == Pooling::Mean,
                None => choice == 0 && request.prompt_logprobs.is_some(),
            },
            hidden: request.pooling.is_some(),
            leader: siblings.and_then(|seqs| seqs.first().copied()),
        })?;
        let answer = Answer {
            request: id,
            choice,
            sampler,
            text: self
                .tokenizer
                .map(|tokenizer| AnswerText::new(tokenizer, request)),
            guide: request
                .grammar
                .as_ref()
                .map(|grammar| grammar.guide(&request.generation.stop_tokens)),
            whole: false,
            stops: generation.stop_matcher(),
            logprobs: request.logprobs,
            max_tokens: self.shared.limits.most_tokens(request),
            generated: 0,
            pool: request.pooling.map(|pooling| Pool::new(pooling, dim)),
            lookup: (request.draft_tokens > 0).then(|| PromptLookup::new(request.draft_tokens)),
            admitted: false,
        };
        self.answers.insert(seq, answer);
        if let Some(open) = self.open.get_mut(&id) {
            open.seqs.push(seq);
        }
        Ok(())
    }

    /// Ends a request at its receiver's wish.
    fn cancel(&mut self, id: RequestId) {
        let seqs = self.open.get(&id).map(|open| open.seqs.clone());
        for seq in seqs.into_iter().flatten() {
            self.finish(seq, FinishReason::Cancelled.into());
        }
    }

    /// One step: plan, compute, choose tokens, tell.
    fn step(&mut self) -> Result<()> {
        let (started, before) = (Instant::now(), self.generated);
        let began = self.shared.config.clock.now();
        let mut plan = std::mem::take(&mut self.plan);
        let guessed = self.guess()?;
        let most = self.pace.most_prompt_tokens();
        self.scheduler.limit_prompts(most);
        self.scheduler.schedule(&mut plan);
        if plan.work().is_empty() {
            return Err(Error::invalid("engine", "the scheduler planned nothing"));
        }
        self.note_preemptions(&plan);
        self.scheduler.fill_batch(&plan, &mut self.batch)?;
        self.begin_masks(&plan);
        let prompt_tokens = pace::prompt_tokens(plan.work());
        let expected = self.pace.expected(prompt_tokens);
        self.shared.pulse.step_begins(expected);
        let shared = self.shared;
        let clock = &shared.config.clock;
        let (model_started, on_clock) = (Instant::now(), clock.now());
        self.runner.step(&self.batch)?;
        self.read_rows(&plan)?;
        let took = clock.now().saturating_sub(on_clock);
        self.pace.learn(prompt_tokens, took);
        self.model_time += model_started.elapsed();
        self.scheduler.commit(&plan);
        self.probe_wanted = false;
        self.choose_ahead(&plan);
        let (mut row, mut hidden_row) = (0, 0);
        for work in plan.work() {
            let rows = row..row + work.rows();
            row = rows.end;
            self.note_admission(work.seq, began);
            if work.hidden {
                self.pool(work, hidden_row);
                hidden_row += work.hidden_rows();
                continue;
            }
            if work.draft > 0 {
                self.verify(work, rows);
                continue;
            }
            if work.logits == LogitRows::All {
                self.give_prompt_logprobs(work, rows.start);
            }
            if let Some(last) = rows.last() {
                self.advance(work.seq, last);
            }
        }
        self.shared.pulse.step_ended(self.shared.config.clock.now());
        let time = started.elapsed();
        // Steps with prompts say nothing about guesses.
        let decodes = |work: &Work| work.len == work.draft + 1;
        if let (Some(draft), Some(guessed)) = (&mut self.draft, guessed)
            && plan.work().iter().all(decodes)
        {
            let tokens = (self.generated - before) as usize;
            let sequences = plan.work().len();
            draft
                .payoff
                .learn(guessed, time.as_secs_f64(), tokens, sequences);
        }
        self.update_stats(Some((plan.tokens(), time)));
        self.plan = plan;
        Ok(())
    }

    /// Proposes drafts for those who want them. Whether the small model guessed; `None` when it is still
    /// reading.
    fn guess(&mut self) -> Result<Option<bool>> {
        let ask_model = self.draft.as_mut().is_some_and(|d| d.payoff.guesses());
        let (mut found, mut asks) = (Vec::new(), Vec::new());
        for (&id, answer) in &mut self.answers {
            if answer.pool.is_some() || answer.lookup.is_none() && !ask_model {
                continue;
            }
            let seq = self.scheduler.sequence(id);
            let Some(seq) = seq.filter(|seq| seq.is_decoding()) else {
                continue;
            };
            // The step gives one token anyway.
            let room = (answer.max_tokens - answer.generated).saturating_sub(1);
            let lookup = answer.lookup.as_mut();
            let tokens = seq.tokens();
            let guess = lookup.map_or(&[][..], |lookup| lookup.guess(tokens, room));
            if !guess.is_empty() {
                found.push((id, guess.to_vec()));
            } else if ask_model {
                asks.push(Ask { id, tokens, room });
            }
        }
        let mut guessed = Some(false);
        // Maps have no order, and who is read first should not be luck.
        asks.sort_unstable_by_key(|ask| ask.id);
        if let Some(draft) = self.draft.as_mut().filter(|_| ask_model) {
            let (ready, guesses) = draft.guess(&asks)?;
            found.extend(guesses);
            guessed = ready.then_some(true);
        }
        for (id, guess) in found {
            self.scheduler.propose(id, &guess);
        }
        Ok(guessed)
    }

    /// Has masks computed beside the step, for those of its rows that choose tokens under a grammar.
    fn begin_masks(&mut self, plan: &StepPlan) {
        for work in plan.work() {
            let seq = self.scheduler.sequence(work.seq);
            let answer = self.answers.get_mut(&work.seq);
            let (Some(seq), Some(guide)) = (seq, answer.and_then(|a| a.guide.as_mut())) else {
                continue;
            };
            // A chunk with more of the prompt to come chooses nothing.
            if work.start + work.len - work.draft == seq.tokens().len() {
                let threads = self.mask_threads.get_or_insert_with(MaskThreads::start);
                guide.begin(&seq.draft()[..work.draft], threads);
            }
        }
    }

    /// Goes through the rows of a draft for as long as it is right.
    fn verify(&mut self, work: &Work, rows: Range<usize>) {
        let before = self.generated;
        for row in rows {
            self.advance(work.seq, row);
        }
        // One of them would have come without a draft.
        let right = (self.generated - before).saturating_sub(1);
        self.drafted.0 += work.draft as u64;
        self.drafted.1 += right;
        self.drafts.add(work.draft, right as usize);
        let answer = self.answers.get_mut(&work.seq);
        if let Some(lookup) = answer.and_then(|answer| answer.lookup.as_mut()) {
            lookup.learn(work.draft, right as usize);
        }
        if let Some(draft) = &mut self.draft {
            draft.learn(work.seq, work.draft, right as usize);
        }
    }

    /// Takes the hidden states of a sequence, which are rows from `first` on. When they are all there,
    /// the sequence has what it came for.
    fn pool(&mut self, work: &Work, first: usize) {
        let Some(answer) = self.answers.get_mut(&work.seq) else {
            return;
        };
        let (Some(pool), Some(seq)) = (&mut answer.pool, self.scheduler.sequence(work.seq)) else {
            return;
        };
        let dim = self.runner.spec().hidden_size;
        let rows = work.hidden_rows();
        let end = work.start + work.len;
        for (i, position) in (end - rows..end).enumerate() {
            pool.add(position, &self.hidden[(first + i) * dim..][..dim]);
        }
        if !seq.is_computed() {
            return;
        }
        let vector = pool.vector();
        if vector.iter().any(|x| x.is_nan()) {
            return self.fail_answer(work.seq, EngineError::NotANumber);
        }
        self.shared.numbers_came();
        if let Some(open) = self.open.get_mut(&answer.request) {
            // Whoever is gone has cancelled, too.
            let _ = open.events.try_send(Event::Embedding(vector));
        }
        self.finish(work.seq, FinishReason::Stop.into());
    }

    /// Reads what the step's sequences need: hidden states, and whole rows of logits or the most likely
    /// tokens only.
    fn read_rows(&mut self, plan: &StepPlan) -> Result<()> {
        let hidden = plan.hidden_rows() * self.runner.spec().hidden_size;
        self.hidden.resize(hidden, 0.0);
        if hidden > 0 {
            self.runner.read_hidden(&mut self.hidden)?;
        }
        let rows = plan.rows();
        self.best.clear();
        if rows == 0 {
            return Ok(());
        }
        let greedy = |work: &Work| match work.logits {
            _ if work.hidden => true,
            LogitRows::None => true,
            LogitRows::All if work.draft == 0 => false,
            _ => self
                .answers
                .get(&work.seq)
                .is_none_or(Answer::is_plain_greedy),
        };
        if plan.work().iter().all(greedy) {
            self.best.resize(rows, 0);
            self.runner.read_argmax(&mut self.best)?;
            // A row of NaN gives token 0, too. That is rare enough to look at the logits then.
            if !self.best.contains(&0) {
                return Ok(());
            }
            self.best.clear();
        }
        let vocab = self.shared.limits.vocab_size;
        self.logits.resize(rows * vocab, 0.0);
        self.runner.read_logits(&mut self.logits)
    }

    /// Sequences that have lost their blocks to others.
    fn note_preemptions(&self, plan: &StepPlan) {
        let preempted = plan.preempted();
        if preempted.is_empty() {
            return;
        }
        let count = preempted.len();
        tracing::debug!(preempted = count, "KV cache full, sequences wait again");
        for id in preempted {
            let request = self.answers.get(id).map(|answer| answer.request);
            if let Some(open) = request.and_then(|request| self.open.get(&request)) {
                open.progress.preemptions.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// The first step of a sequence, which began then: it no longer counts as waiting.
    fn note_admission(&mut self, id: SeqId, began: Duration) {
        let Some(answer) = self.answers.get_mut(&id) else {
            return;
        };
        if std::mem::replace(&mut answer.admitted, true) {
            return;
        }
        self.shared.queued.fetch_sub(1, Ordering::AcqRel);
        if answer.choice == 0
            && let Some(open) = self.open.get_mut(&answer.request)
        {
            let cached = self.scheduler.sequence(id).and_then(|seq| seq.cached());
            let cached = cached.unwrap_or(0);
            open.usage.cached_tokens = cached;
            open.progress.cached.store(cached, Ordering::Relaxed);
            // Nobody else writes it, and a sequence is admitted once.
            let _ = open.progress.queued.set(began.saturating_sub(open.came));
        }
    }

    /// Log-probabilities of the prompt tokens after those in `work`, whose logits begin at `first`.
    fn give_prompt_logprobs(&mut self, work: &Work, first: usize) {
        let vocab = self.shared.limits.vocab_size;
        let Some(answer) = self.answers.get(&work.seq) else {
            return;
        };
        let seq = self.scheduler.sequence(work.seq);
        let open = self.open.get_mut(&answer.request);
        let (Some(seq), Some(open)) = (seq, open) else {
            return;
        };
        let Some(top) = open.prompt_logprobs else {
            return;
        };
        // The logits of a position speak of the next token. Rows that were there before a preemption
        // are not given twice.
        let end = (work.start + work.len).min(seq.prompt_len() - 1);
        let fresh = work.start.max(open.prompt_rows)..end;
        if fresh.is_empty() {
            return;
        }
        open.prompt_rows = end;
        let of = |at: usize| {
            let row = &self.logits[(first + at - work.start) * vocab..][..vocab];
            has_number(row).then(|| logprobs(row, seq.tokens()[at + 1], top))
        };
        let Some(found) = fresh.map(of).collect() else {
            return self.fail_answer(work.seq, EngineError::NotANumber);
        };
        let event = Event::PromptLogprobs(found);
        // Whoever is gone has cancelled, too.
        let _ = open.events.try_send(event);
    }

    /// The next token of a sequence, from a row of logits.
    fn advance(&mut self, id: SeqId, row: usize) {
        let seq = self.scheduler.sequence(id);
        let (Some(answer), Some(seq)) = (self.answers.get_mut(&id), seq) else {
            return;
        };
        if !seq.is_computed() {
            // A chunk whose every token gave logits, and more of the prompt is to come.
            return;
        }
        if answer.max_tokens == 0 {
            return self.finish(id, FinishReason::Length.into());
        }
        let ahead = self.chosen.get_mut(row).and_then(Option::take);
        let chosen = match self.best.get(row) {
            Some(&best) => Chosen::Token(best, None),
            None => ahead.unwrap_or_else(|| {
                let vocab = self.shared.limits.vocab_size;
                answer.choose(&mut self.logits[row * vocab..][..vocab], seq.tokens())
            }),
        };
        let (token, logprobs) = match chosen {
            Chosen::Token(token, logprobs) => {
                self.shared.numbers_came();
                (token, logprobs)
            }
            Chosen::End => return self.finish(id, FinishReason::Stop.into()),
            Chosen::Failed(error) => return self.fail_answer(id, error),
        };
        let Some(open) = self.open.get_mut(&answer.request) else {
            return;
        };
        // What ends an answer was generated, too: OpenAI and vLLM count it.
        open.usage.completion_tokens += 1;
        self.generated += 1;
        if open.stop_tokens.contains(&token) {
            let ending = Ending {
                stop: Some(StopMatch::Token(token)),
                logprobs,
                ..FinishReason::Stop.into()
            };
            return self.finish(id, ending);
        }
        let text = match answer.push(token) {
            Ok(text) => text,
            Err(error) => return self.fail_answer(id, error),
        };
        let event = Event::Token {
            choice: answer.choice,
            token,
            text,
            logprobs,
        };
        let gone = open.events.try_send(event).is_err();
        let has_room = self.scheduler.append(id, token);
        let ending = match gone {
            true => Some(FinishReason::Cancelled.into()),
            false => answer.ending(has_room),
        };
        if let Some(ending) = ending {
            self.finish(id, ending);
        }
    }

    /// Ends a choice: frees its blocks and tells its request.
    fn finish(&mut self, id: SeqId, ending: Ending) {
        self.scheduler.remove(id);
        if let Some(draft) = &mut self.draft {
            draft.forget(id);
        }
        let Some(mut answer) = self.answers.remove(&id) else {
            return;
        };
        if !answer.admitted {
            self.shared.queued.fetch_sub(1, Ordering::AcqRel);
        }
        let Some(open) = self.open.get_mut(&answer.request) else {
            return;
        };
        let _ = open.events.try_send(Event::Finished {
            choice: answer.choice,
            text: answer.rest(),
            reason: ending.reason,
            stop: ending.stop,
            logprobs: ending.logprobs,
        });
        open.seqs.retain(|&seq| seq != id);
        if open.seqs.is_empty() {
            let _ = open.events.try_send(Event::Done(open.usage));
            let adapted = open.adapter.is_some();
            self.open.remove(&answer.request);
            self.count_finished();
            if adapted {
                self.forget_adapters();
            }
        }
    }

    /// Ends a request of whose answers one cannot go on.
    fn fail_answer(&mut self, id: SeqId, error: EngineError) {
        let Some(request) = self.answers.get(&id).map(|answer| answer.request) else {
            return;
        };
        if error == EngineError::NotANumber {
            tracing::error!(request = request.0, "the model computed NaN for a request");
            self.shared.nan_streak.fetch_add(1, Ordering::AcqRel);
            self.shared.stats().nan_failures += 1;
        }
        self.fail_request(request, error);
    }

    /// Ends a request that cannot be answered.
    fn fail_request(&mut self, id: RequestId, error: EngineError) {
        let Some(open) = self.open.remove(&id) else {
            return;
        };
        let _ = open.events.try_send(Event::Failed(error));
        for seq in open.seqs {
            self.scheduler.remove(seq);
            if let Some(draft) = &mut self.draft {
                draft.forget(seq);
            }
            if self.answers.remove(&seq).is_some_and(|a| !a.admitted) {
                self.shared.queued.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }

    /// Tells everybody who is still there that it is over. Looks at nothing that a panic may have left
    /// half done.
    pub(super) fn fail_all(&mut self) {
        let error = self.shared.phase.borrow().refusal();
        let error = error.unwrap_or(EngineError::ShuttingDown);
        for (_, open) in self.open.drain() {
            let _ = open.events.try_send(Event::Failed(error.clone()));
        }
    }

    /// A step of one token for nobody, which shows that steps still end.
    fn probe(&mut self) -> Result<()> {
        self.probe_wanted = false;
        let mut table = BlockTable::default();
        if !self.scheduler.lend(&mut table) {
            return Ok(());
        }
        self.batch.clear();
        self.batch.push(SeqStep {
            tokens: &[0],
            start: 0,
            prompt_len: 1,
            blocks: table.blocks(),
            hidden: false,
            logits: LogitRows::Last,
            adapter: None,
        })?;
        self.runner.step(&self.batch)?;
        self.logits.resize(self.shared.limits.vocab_size, 0.0);
        self.runner.read_logits(&mut self.logits)?;
        if has_number(&self.logits) {
            self.shared.numbers_came();
        }
        self.scheduler.take_back(&mut table);
        self.shared.pulse.step_ended(self.shared.config.clock.now());
        Ok(())
    }

    fn count_finished(&self) {
        self.shared.stats().finished_requests += 1;
    }

    /// `step`: tokens and time of a step that has ended.
    fn update_stats(&self, step: Option<(usize, Duration)>) {
        let counters = self.scheduler.counters();
        let pool = self.scheduler.pool();
        let mut stats = self.shared.stats();
        stats.running = self.scheduler.running();
        let admitted = self.answers.values().filter(|a| a.admitted).count();
        stats.preempted = admitted.saturating_sub(stats.running);
        stats.kv_blocks = pool.blocks();
        stats.kv_block_size = pool.block_size();
        stats.kv_blocks_used = pool.used();
        stats.kv_blocks_cached = pool.cached();
        stats.prompt_tokens = counters.prompt_tokens;
        stats.cached_tokens = counters.cached_tokens;
        stats.preemptions = counters.preemptions;
        stats.generated_tokens = self.generated;
        stats.model_time = self.model_time;
        (stats.draft_tokens, stats.accepted_tokens) = self.drafted;
        stats.drafts = self.drafts;
        if let Some((tokens, time)) = step {
            stats.computed_tokens += tokens as u64;
            stats.steps += 1;
            stats.step_sizes.add(tokens);
            stats.step_time += time;
            stats.last_step_time = time;
            stats.last_step = self.shared.config.clock.now();
        }
    }
}
