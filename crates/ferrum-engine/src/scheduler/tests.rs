//! The scheduler on a device that is only memory: each cell of a block holds what would have been
//! computed for it, and a step checks that it reads what a sequence by itself would have written.

mod batch_order;
mod images;
mod offloaded;
mod priorities;
mod states;
mod whole_prompts;
mod windows;

use super::*;
use crate::image_embeddings::ImageEmbeddings;
use crate::pool::CacheSalt;
use ferrum_models::{LogitRows, StepBatch, spanned_blocks};
use ferrum_types::{BlockId, StateSlot};
use proptest::prelude::*;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use std::hash::RandomState;
use std::ops::Range;

const CONFIG: SchedulerConfig = SchedulerConfig {
    max_seqs: 4,
    max_tokens: 12,
    max_logit_rows: 6,
    context: 40,
    priority_step_credit: 50,
    whole_prompts: false,
    state_checkpoint_interval: 8,
};

fn scheduler(config: SchedulerConfig, blocks: usize, block_size: usize) -> Scheduler {
    Scheduler::new(config, BlockPool::new(blocks, block_size)).unwrap()
}

fn new(id: u64, prompt: Vec<TokenId>) -> NewSequence {
    NewSequence {
        id: SeqId(id),
        prompt,
        priority: 0,
        deadline: None,
        salt: CacheSalt::default(),
        images: Vec::new(),
        prompt_logits: false,
        hidden: false,
        leader: None,
        max_tokens: usize::MAX,
    }
}

/// Blocks and windows of groups.
type Groups = &'static [(usize, Option<usize>)];

/// The test's own record of a request.
struct Asked {
    left: usize,
    /// Where its images are, and which they are.
    images: Vec<(Range<usize>, u64)>,
    salt: CacheSalt,
    /// Next prompt position whose logits are due.
    rows_due: Option<usize>,
    /// Whether it got a token in the last step that it was in.
    decoding: bool,
    since: u64,
}

struct Sim {
    scheduler: Scheduler,
    windows: Vec<Option<usize>>,
    /// By group.
    cells: Vec<Vec<u64>>,
    /// By state slot.
    states: Vec<u64>,
    asked: HashMap<SeqId, Asked>,
    plan: StepPlan,
    next_id: u64,
    now: Duration,
    ended: u64,
    drafts: bool,
    gained: usize,
    /// Whether steps overlap.
    ahead: bool,
    flight: Option<Flight>,
    /// Steps that began before the one before them was committed.
    overlapped: usize,
    /// What is beside the device.
    memory: Option<offloaded::Memory>,
    /// Images that prompts may have.
    images: Vec<ImageEmbeddings>,
}

/// A step in flight, with the contents of its batch.
struct Flight {
    plan: StepPlan,
    batch: Vec<Run>,
    starts: Vec<StateInit>,
    keeps: Vec<(StateSlot, StateSlot)>,
}

struct Run {
    scheduled: ScheduledSequence,
    tokens: Vec<TokenId>,
    /// By group.
    blocks: Vec<Vec<BlockId>>,
    state: Option<StateSlot>,
    root: u64,
    images: Vec<(Range<usize>, u64)>,
}

impl Run {
    /// The blocks of a group that it writes to.
    fn written(&self, group: usize, block_size: usize) -> &[BlockId] {
        let end = self.scheduled.start + self.scheduled.len;
        &self.blocks[group][self.scheduled.start / block_size..end.div_ceil(block_size)]
    }
}

fn mix(a: u64, b: u64) -> u64 {
    (a ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15))
        .wrapping_mul(0xbf58_476d_1ce4_e5b9)
        .rotate_left(29)
}

impl Sim {
    fn new(config: SchedulerConfig, blocks: usize, block_size: usize) -> Self {
        Self::with_groups(config, &[(blocks, None)], block_size)
    }

    fn with_groups(
        config: SchedulerConfig,
        groups: &[(usize, Option<usize>)],
        block_size: usize,
    ) -> Self {
        let pool = BlockPool::with_hasher(groups, block_size, RandomState::new());
        Self {
            scheduler: Scheduler::new(config, pool).unwrap(),
            windows: groups.iter().map(|group| group.1).collect(),
            cells: groups
                .iter()
                .map(|(n, _)| vec![0; n * block_size])
                .collect(),
            states: Vec::new(),
            asked: HashMap::new(),
            plan: StepPlan::default(),
            next_id: 0,
            now: Duration::ZERO,
            ended: 0,
            drafts: false,
            gained: 0,
            ahead: false,
            flight: None,
            overlapped: 0,
            memory: None,
            images: Vec::new(),
        }
    }

    fn add(&mut self, mut new: NewSequence, tokens: usize) -> SeqId {
        self.next_id += 1;
        let id = SeqId(self.next_id);
        (new.id, new.max_tokens) = (id, tokens);
        let known = new.images.iter().map(|image| {
            let key = u64::from(image.image.cache_key());
            (image.span().positions(), key)
        });
        let asked = Asked {
            left: tokens,
            images: known.collect(),
            salt: new.salt.clone(),
            rows_due: new.prompt_logits.then_some(0),
            decoding: false,
            since: self.scheduler.counters().steps,
        };
        self.scheduler.add(new).unwrap();
        self.asked.insert(id, asked);
        id
    }

    fn end(&mut self, id: SeqId) {
        self.scheduler.remove(id).unwrap();
        self.asked.remove(&id).unwrap();
        self.ended += 1;
    }

    /// Plans a step and runs it, or the one before it, and gives every sequence with logits a token.
    fn step(&mut self) {
        while let Some(id) = self.scheduler.overdue(self.now) {
            self.end(id);
        }
        self.now += Duration::from_millis(1);
        let begun = match &self.flight {
            None => Some(self.plan()),
            // How many tokens a draft gives is not known ahead.
            Some(flight) if flight.plan.sequences().iter().any(|s| s.draft > 0) => None,
            Some(_) => self.plan_ahead(),
        };
        let ended = match self.ahead {
            true => std::mem::replace(&mut self.flight, begun),
            false => begun,
        };
        let Some(Flight {
            plan,
            batch,
            starts,
            keeps,
        }) = ended
        else {
            return;
        };
        for StateInit { slot, from } in starts {
            self.states[slot.0 as usize] = from.map_or(0, |from| self.states[from.0 as usize]);
        }
        for run in &batch {
            self.run(run);
        }
        for (from, to) in keeps {
            self.states[to.0 as usize] = self.states[from.0 as usize];
        }
        self.scheduler.commit(&plan);
        for scheduled in plan.sequences() {
            self.give(*scheduled);
        }
        self.plan = plan;
    }

    fn plan(&mut self) -> Flight {
        self.propose();
        let mut plan = std::mem::take(&mut self.plan);
        self.scheduler.schedule(&mut plan);
        self.move_entries();
        let waits = self.scheduler.is_empty() || self.scheduler.waits_for_files();
        let stalls = plan.sequences().is_empty() && !waits;
        assert!(!stalls, "a stall");
        self.begin(plan)
    }

    fn plan_ahead(&mut self) -> Option<Flight> {
        let mut plan = StepPlan::default();
        let planned = self.scheduler.schedule_ahead(&mut plan);
        self.move_entries();
        if !planned {
            return None;
        }
        assert!(plan.preempted().is_empty());
        self.overlapped += 1;
        Some(self.begin(plan))
    }

    fn begin(&mut self, plan: StepPlan) -> Flight {
        self.check_plan(&plan);
        let batch: Vec<_> = plan
            .sequences()
            .iter()
            .map(|&scheduled| self.expected_run(scheduled))
            .collect();
        // No other sequence uses blocks that a step in flight writes to.
        let size = self.scheduler.pool().block_size();
        for before in self.flight.iter().flat_map(|flight| &flight.batch) {
            let others = batch
                .iter()
                .filter(|run| run.scheduled.seq != before.scheduled.seq);
            for (run, group) in others.flat_map(|run| (0..run.blocks.len()).map(move |g| (run, g)))
            {
                let written = before.written(group, size);
                let shared = run.blocks[group]
                    .iter()
                    .find(|block| written.contains(block));
                assert_eq!(
                    shared, None,
                    "{:?} and {:?}",
                    before.scheduled, run.scheduled
                );
            }
        }
        batch.iter().for_each(|run| self.check_windows(run));
        let due = |scheduled: &&ScheduledSequence| {
            self.scheduler
                .sequence(scheduled.seq)
                .unwrap()
                .pending_tokens()
                > 0
        };
        let due = plan.sequences().iter().filter(due).count();
        let mut filled = StepBatch::default();
        self.scheduler.begin(&plan, &mut filled).unwrap();
        self.move_entries();
        assert_eq!(filled.pending_tokens.len(), due);
        let asked = batch.iter().flat_map(|run| {
            let known = &run.tokens[run.scheduled.start..];
            known.iter().copied()
        });
        let mut asked: Vec<_> = asked.collect();
        for chosen in &filled.pending_tokens {
            asked[chosen.token as usize] = 0;
        }
        assert_eq!(filled.tokens, asked);
        for (seq, run) in batch.iter().enumerate() {
            for (group, blocks) in run.blocks.iter().enumerate() {
                assert_eq!(filled.table(group, seq), blocks);
            }
        }
        let slots: Vec<_> = batch.iter().filter_map(|run| run.state).collect();
        assert_eq!(filled.state_slots, slots);
        Flight {
            plan,
            batch,
            starts: filled.state_inits,
            keeps: filled.state_keeps,
        }
    }

    /// A group with a window holds no more blocks than the window and the steps in flight need.
    fn check_windows(&self, run: &Run) {
        let size = self.scheduler.pool().block_size();
        let table = &self.scheduler.sequence(run.scheduled.seq).unwrap().table;
        let flight = self
            .flight
            .iter()
            .flat_map(|flight| flight.plan.sequences());
        let flight = flight.filter(|scheduled| scheduled.seq == run.scheduled.seq);
        let tokens = run.scheduled.len + flight.map(|scheduled| scheduled.len).sum::<usize>();
        // What is left of a draft that was wrong.
        let tokens = tokens + if self.drafts { 3 } else { 0 };
        for (group, window) in self.windows.iter().enumerate() {
            let most = window.map_or(usize::MAX, |w| spanned_blocks(w + tokens, size));
            assert!(
                table.held(group) <= most,
                "{:?} of {most}",
                table.held(group)
            );
        }
    }

    /// The expected batch contents of one sequence; a pending token is the one that will be generated.
    fn expected_run(&self, scheduled: ScheduledSequence) -> Run {
        let seq = self.scheduler.sequence(scheduled.seq).unwrap();
        let mut tokens = seq.tokens().to_vec();
        tokens.extend((0..seq.pending_tokens()).map(|_| next_token(seq)));
        tokens.truncate(scheduled.start + scheduled.len - scheduled.draft);
        tokens.extend(&seq.draft[..scheduled.draft]);
        assert_eq!(tokens.len(), scheduled.start + scheduled.len);
        Run {
            scheduled,
            tokens,
            blocks: (0..self.windows.len())
                .map(|group| seq.table.group(group).to_vec())
                .collect(),
            state: seq.table.state(),
            root: scheduler_root(&self.asked[&scheduled.seq].salt),
            images: self.asked[&scheduled.seq].images.clone(),
        }
    }

    /// Drafts that are right, partly right, and wrong.
    fn propose(&mut self) {
        if !self.drafts {
            return;
        }
        let ids: Vec<_> = self.asked.keys().copied().collect();
        for id in ids {
            let seq = self.scheduler.sequence(id).unwrap();
            if seq.is_decoding() {
                let len = seq.tokens().len();
                let wrong = (len * 7 + id.0 as usize) % 5;
                let right = |i: usize| ((len + i) % 2) as TokenId;
                let draft: Vec<_> = (0..len % 4)
                    .map(|i| right(i) ^ TokenId::from(i == wrong))
                    .collect();
                self.scheduler.propose(id, &draft);
            }
        }
    }

    fn check_plan(&mut self, plan: &StepPlan) {
        let config = *self.scheduler.config();
        assert!(plan.tokens() <= config.max_tokens, "{plan:?}");
        assert!(plan.rows() <= config.max_logit_rows, "{plan:?}");
        assert!(plan.sequences().len() <= config.max_seqs, "{plan:?}");
        for ScheduledSequence {
            seq, start, len, ..
        } in plan.sequences()
        {
            let (begin, end) = (*start, start + len);
            let images = &self.asked[seq].images;
            let cut = images
                .iter()
                .find(|(image, _)| image.start < end && end < image.end);
            assert_eq!(cut, None, "a step from {begin} to {end}");
        }
        for id in plan.preempted() {
            self.asked.get_mut(id).unwrap().decoding = false;
        }
        // Whoever got a token in the step before is in this one.
        for (id, asked) in &self.asked {
            let here = plan.sequences().iter().filter(|w| w.seq == *id).count();
            let decoding = asked.decoding && self.scheduler.goes_on(*id);
            assert!(here == 1 || !decoding && here == 0, "{id:?} {plan:?}");
        }
    }

    fn run(&mut self, run: &Run) {
        let (scheduled, size) = (run.scheduled, self.scheduler.pool().block_size());
        let mut value = run.root;
        for (at, &token) in run.tokens.iter().enumerate() {
            if let (Some(StateSlot(slot)), true) = (run.state, at == scheduled.start) {
                let expected = if at == 0 { 0 } else { value };
                assert_eq!(
                    self.states[slot as usize], expected,
                    "the state of {scheduled:?}"
                );
            }
            let mut images = run.images.iter();
            let image = images.find(|(place, _)| place.contains(&at));
            value = mix(value, image.map_or(u64::from(token) + 1, |(_, key)| *key));
            for (group, window) in self.windows.iter().enumerate() {
                let seen = window.map_or(0, |w| (scheduled.start + 1).saturating_sub(w));
                if at < seen {
                    continue;
                }
                let block = run.blocks[group][at / size];
                let cell = &mut self.cells[group][block.0 as usize * size + at % size];
                if at < scheduled.start {
                    assert_eq!(*cell, value, "position {at} of {scheduled:?}");
                } else {
                    *cell = value;
                }
            }
        }
        if let Some(StateSlot(slot)) = run.state {
            self.states[slot as usize] = value;
        }
        let Some(asked) = self.asked.get_mut(&scheduled.seq) else {
            return;
        };
        if let (Some(due), LogitRows::All, 0) = (asked.rows_due, scheduled.logits, scheduled.draft)
        {
            assert!(
                scheduled.start <= due,
                "rows {due}.. were left out by {scheduled:?}"
            );
            asked.rows_due = Some(due.max(scheduled.start + scheduled.len));
        }
    }

    /// A token for each row that counts.
    fn give(&mut self, scheduled: ScheduledSequence) {
        let Some(seq) = self.scheduler.sequence(scheduled.seq) else {
            assert!(self.ahead, "nobody ends within a step");
            return;
        };
        if !scheduled.gives_token {
            assert_ne!(scheduled.logits, LogitRows::Last);
            return;
        }
        assert_ne!(scheduled.logits, LogitRows::None);
        let asked = self.asked.get_mut(&scheduled.seq).unwrap();
        let prompt_rows = seq.prompt_len().saturating_sub(1);
        assert!(asked.rows_due.is_none_or(|due| due >= prompt_rows));
        asked.decoding = true;
        // The step after it may be in flight, and gives one more.
        let later = usize::from(self.gives_in_flight(scheduled.seq));
        let mut rows = 1 + scheduled.draft;
        while let Some(seq) = self.scheduler.sequence(scheduled.seq)
            && seq.pending_tokens() > later
        {
            assert!(rows > 0, "more tokens than rows");
            rows -= 1;
            let token = next_token(seq);
            // Some end with a token, which no length foretells.
            let place = scheduled.seq.0 as usize + seq.tokens().len() * 7;
            let stops = self.ahead && place.is_multiple_of(37);
            self.gained += usize::from(rows < scheduled.draft);
            let asked = self.asked.get_mut(&scheduled.seq).unwrap();
            asked.left -= 1;
            let last = asked.left == 0 || stops;
            if !self.scheduler.append(scheduled.seq, token) || last {
                self.end(scheduled.seq);
            }
        }
    }

    fn gives_in_flight(&self, id: SeqId) -> bool {
        let scheduled = self
            .flight
            .iter()
            .flat_map(|flight| flight.plan.sequences());
        scheduled
            .clone()
            .any(|scheduled| scheduled.seq == id && scheduled.gives_token)
    }

    /// Adds or removes a sequence, or steps, as `dice` says.
    fn operate(&mut self, mut dice: impl FnMut(u32) -> u32) {
        let capacity = self.scheduler.capacity() as u32;
        match dice(9) {
            0..=1 if self.asked.len() < 12 => {
                let long = if dice(4) == 0 {
                    capacity
                } else {
                    8.min(capacity)
                };
                let prompt: Vec<_> = (0..1 + dice(long)).map(|_| dice(9) / 8).collect();
                let tenant = dice(3);
                let salt = CacheSalt {
                    tenant: (tenant > 0).then(|| tenant.to_string().into()),
                    ..CacheSalt::default()
                };
                let images = images::choose(&self.images, prompt.len(), &mut dice);
                let leader = self.asked.keys().min().copied().filter(|_| dice(3) == 0);
                let wanted = NewSequence {
                    priority: dice(3) as i8 - 1,
                    deadline: (dice(6) == 0)
                        .then(|| self.now + Duration::from_millis(u64::from(dice(60)))),
                    salt,
                    prompt_logits: images.is_empty() && dice(5) == 0,
                    images,
                    leader,
                    ..new(0, prompt)
                };
                let tokens = 1 + dice(20) as usize;
                self.add(wanted, tokens);
            }
            2 if !self.asked.is_empty() && dice(3) == 0 => {
                let nth = dice(self.asked.len() as u32) as usize;
                let mut ids: Vec<_> = self.asked.keys().copied().collect();
                ids.sort_unstable();
                self.end(ids[nth]);
            }
            _ => self.step(),
        }
    }

    /// Random operations until there were so many steps.
    fn run_random(&mut self, rng: &mut ChaCha8Rng, most: u64) {
        while self.scheduler.counters().steps < most {
            self.operate(|n| ((u64::from(rng.next_u32()) * u64::from(n)) >> 32) as u32);
            if rng.next_u32().is_multiple_of(16) {
                self.scheduler.check().unwrap();
            }
            // No starvation, whatever the priorities: the longest that one was here.
            let steps = self.scheduler.counters().steps;
            if steps.is_multiple_of(64) {
                let oldest = self.asked.values().map(|a| steps - a.since).max();
                assert!(oldest.unwrap_or(0) < 2000, "{oldest:?}");
            }
        }
    }

    /// Steps until all sequences have ended.
    fn drain(&mut self) {
        let most = self.scheduler.counters().steps + 10_000;
        while !self.asked.is_empty() || self.flight.is_some() {
            self.step();
            assert!(
                self.scheduler.counters().steps < most,
                "somebody never ends"
            );
        }
        self.scheduler.check().unwrap();
        assert_eq!(self.scheduler.pool().used(), 0);
    }
}

/// What comes after the tokens of a sequence.
fn next_token(seq: &Sequence) -> TokenId {
    (seq.tokens().len() % 2) as TokenId
}

fn scheduler_root(salt: &CacheSalt) -> u64 {
    let tenant = salt.tenant.as_deref().unwrap_or("");
    tenant.bytes().fold(7, |sum, b| mix(sum, u64::from(b)))
}

#[test]
fn a_million_random_steps_keep_every_invariant() {
    let shapes = [(1, 12, 4), (2, 40, 1), (3, 30, 3), (4, 6, 2), (5, 1, 7)];
    for (seed, blocks, block_size) in shapes {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut sim = Sim::new(CONFIG, blocks, block_size);
        (sim.drafts, sim.ahead) = (seed % 2 == 1, seed.is_multiple_of(2));
        sim.run_random(&mut rng, 220_000);
        let counters = sim.scheduler.counters();
        sim.drain();
        assert!(sim.ended > 1000);
        assert!(block_size == 7 || !sim.drafts || sim.gained > 1000);
        assert!(
            !sim.ahead || sim.overlapped > 10_000,
            "{} of {counters:?}",
            sim.overlapped
        );
        assert!(
            block_size == 7 || counters.preemptions > 1000,
            "{counters:?}"
        );
        assert!(
            block_size == 7 || counters.cached_tokens > 1000,
            "{counters:?}"
        );
    }
}

proptest! {
    #[test]
    fn any_operations_end_well(
        blocks in 1usize..12,
        block_size in 1usize..5,
        (windowed, window, kinds) in (1usize..12, 1usize..9, 0..3),
        max_seqs in 1usize..5,
        max_tokens in 1usize..9,
        max_logit_rows in 1usize..9,
        dice in prop::collection::vec(any::<u32>(), 0..300),
    ) {
        let config = SchedulerConfig { max_seqs, max_tokens, max_logit_rows, ..CONFIG };
        let groups = [(blocks, None), (windowed, Some(window))];
        let groups = &groups[usize::from(kinds == 0)..][..1 + usize::from(kinds == 2)];
        let mut sim = Sim::with_groups(config, groups, block_size);
        (sim.drafts, sim.ahead) = (dice.len() % 3 == 1, dice.len() % 3 == 2);
        let mut rest = dice.into_iter();
        while rest.len() > 0 {
            sim.operate(|n| rest.next().unwrap_or(0) % n);
            sim.scheduler.check().unwrap();
        }
        sim.drain();
    }
}

#[test]
fn a_long_prompt_delays_nobody_by_more_than_a_step() {
    let config = SchedulerConfig {
        context: 2000,
        ..CONFIG
    };
    let mut sim = Sim::new(config, 600, 4);
    let first = sim.add(new(0, vec![1; 5]), 300);
    sim.step();
    let long = sim.add(new(0, (0..1500).collect()), 1);
    sim.step();
    let short = sim.add(new(0, vec![3; 4]), 50);
    // One decode, half of the rest for the long prompt, and all that the short one needs.
    sim.step();
    let lens = |sim: &Sim, id| {
        let of = |w: &&ScheduledSequence| w.seq == id;
        sim.plan.sequences().iter().find(of).map(|w| w.len)
    };
    assert_eq!(lens(&sim, first), Some(1));
    assert_eq!(lens(&sim, short), Some(4));
    assert_eq!(lens(&sim, long), Some(7), "what the short one left is used");
    for _ in 0..40 {
        sim.step();
        assert_eq!((lens(&sim, first), lens(&sim, short)), (Some(1), Some(1)));
        assert_eq!(lens(&sim, long), Some(10));
    }
    sim.drain();
}

#[test]
fn first_come_first_served_within_a_priority() {
    let config = SchedulerConfig {
        max_seqs: 1,
        ..CONFIG
    };
    let mut sim = Sim::new(config, 20, 2);
    let mut ids: Vec<_> = (0..4).map(|i| sim.add(new(0, vec![i; 3]), 2)).collect();
    let urgent = NewSequence {
        priority: 1,
        ..new(0, vec![9; 3])
    };
    ids.insert(0, sim.add(urgent, 2));
    let mut order = Vec::new();
    while !sim.asked.is_empty() {
        sim.step();
        order.extend(sim.plan.sequences().iter().map(|w| w.seq));
        order.dedup();
    }
    assert_eq!(order, ids);
}

#[test]
fn who_came_last_is_preempted_and_comes_back() {
    let mut sim = Sim::new(CONFIG, 6, 2);
    let old = sim.add(new(0, vec![1; 4]), 8);
    let young = sim.add(new(0, vec![2; 3]), 6);
    let mut preempted = Vec::new();
    while !sim.asked.is_empty() {
        sim.step();
        preempted.extend_from_slice(sim.plan.preempted());
        sim.scheduler.check().unwrap();
    }
    assert!(
        !preempted.is_empty() && !preempted.contains(&old),
        "{preempted:?}"
    );
    assert!(preempted.contains(&young));
}

#[test]
fn prompts_have_a_share_of_steps_in_which_somebody_decodes() {
    let config = SchedulerConfig {
        max_tokens: 30,
        ..CONFIG
    };
    let mut sim = Sim::new(config, 40, 4);
    sim.scheduler.limit_prompts(5);
    let first = sim.add(new(0, vec![1; 20]), 12);
    sim.step();
    assert_eq!(sim.plan.tokens(), 20, "nobody waits for anything else");
    sim.add(new(0, vec![2; 18]), 2);
    sim.add(new(0, vec![3; 18]), 2);
    while sim.asked.contains_key(&first) {
        sim.step();
        let tokens: usize = sim
            .plan
            .sequences()
            .iter()
            .map(|scheduled| scheduled.len)
            .sum();
        let decodes = sim
            .plan
            .sequences()
            .iter()
            .filter(|scheduled| scheduled.len == 1)
            .count();
        assert!(tokens <= 5 + decodes, "{:?}", sim.plan);
    }
    sim.drain();
}

#[test]
fn followers_wait_for_their_leader_and_share_its_blocks() {
    let mut sim = Sim::new(CONFIG, 40, 4);
    let prompt: Vec<_> = (0..30).collect();
    let leader = sim.add(new(0, prompt.clone()), 9);
    let follower = NewSequence {
        leader: Some(leader),
        ..new(0, prompt)
    };
    let follower = sim.add(follower, 3);
    let other = sim.add(new(0, vec![7; 2]), 20);
    sim.step();
    let there: Vec<_> = sim.plan.sequences().iter().map(|w| w.seq).collect();
    assert_eq!(there, [leader, other], "who follows holds up nobody");
    while sim.scheduler.sequence(follower).unwrap().cached().is_none() {
        sim.step();
    }
    let seq = sim.scheduler.sequence(follower).unwrap();
    assert_eq!(seq.cached(), Some(28));
    let blocks = sim.scheduler.sequence(leader).unwrap().table.blocks();
    assert_eq!(seq.table.blocks()[..7], blocks[..7]);
    sim.drain();
}

#[test]
fn what_does_not_fit_is_refused() {
    let mut scheduler = scheduler(CONFIG, 4, 4);
    assert_eq!(scheduler.capacity(), 16);
    let long = scheduler.add(new(1, vec![0; 17])).unwrap_err();
    assert!(matches!(
        long,
        Error::ContextOverflow {
            requested: 17,
            capacity: 16
        }
    ));
    assert!(scheduler.add(new(1, vec![])).is_err());
    scheduler.add(new(1, vec![0; 16])).unwrap();
    assert!(scheduler.add(new(1, vec![0])).is_err());
    assert!(!scheduler.append(SeqId(1), 0), "no room to compute a 17th");
    let none = SchedulerConfig {
        max_tokens: 0,
        ..CONFIG
    };
    assert!(Scheduler::new(none, BlockPool::new(1, 1)).is_err());
    assert!(Scheduler::new(CONFIG, BlockPool::new(0, 1)).is_err());
}
