//! Recurrent states: the books hold under random operations, and prefixes are taken up to where a state was kept.

use super::*;
use ferrum_models::StateSlots;

/// A simulation whose sequences have states, of which so many are kept.
pub(super) fn with_states(
    config: SchedulerConfig,
    groups: &[(usize, Option<usize>)],
    block_size: usize,
    kept: usize,
) -> Sim {
    let mut sim = Sim::with_groups(config, groups, block_size);
    let slots = StateSlots {
        working: config.max_seqs,
        kept,
    };
    let pool = BlockPool::with_hasher(groups, block_size, RandomState::new());
    sim.scheduler = Scheduler::new(config, pool.with_states(Some(slots))).unwrap();
    // A slot's contents before its first use are arbitrary.
    sim.states = vec![99; slots.count()];
    sim
}

/// Prompt tokens that the next admission of this prompt finds.
fn cached(sim: &mut Sim, prompt: Vec<TokenId>) -> usize {
    let id = sim.add(new(0, prompt), 1);
    sim.step();
    while sim
        .scheduler
        .sequence(id)
        .is_some_and(|seq| seq.cached().is_none())
    {
        sim.step();
    }
    let before = sim.scheduler.counters().cached_tokens;
    sim.drain();
    before as usize
}

#[test]
fn states_keep_every_invariant() {
    // Blocks, their size, checkpoints, and their interval.
    let shapes: [(Groups, usize, usize, usize); 7] = [
        (&[(40, None)], 4, 6, 8),
        (&[(12, None)], 4, 2, 4),
        (&[(30, None)], 3, 1, 0),
        (&[(48, None)], 1, 20, 7),
        (&[(20, None)], 2, 0, 4),
        (&[(30, None), (10, Some(5))], 3, 5, 6),
        (&[(24, None)], 2, 9, 100),
    ];
    for ((groups, block_size, kept, state_checkpoint_interval), seed) in
        shapes.into_iter().zip(40..)
    {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let config = SchedulerConfig {
            state_checkpoint_interval,
            ..CONFIG
        };
        let mut sim = with_states(config, groups, block_size, kept);
        (sim.drafts, sim.ahead) = (seed % 3 == 1, seed.is_multiple_of(2));
        sim.run_random(&mut rng, 40_000);
        let counters = sim.scheduler.counters();
        sim.drain();
        assert!(sim.ended > 1000);
        assert_eq!(sim.gained > 500, sim.drafts, "{seed}: {}", sim.gained);
        assert!(!sim.ahead || sim.overlapped > 1000, "{}", sim.overlapped);
        assert_eq!(counters.cached_tokens > 100, kept > 0, "{counters:?}");
    }
}

#[test]
fn a_prefix_goes_up_to_the_longest_kept_state() {
    let config = SchedulerConfig {
        state_checkpoint_interval: 8,
        ..CONFIG
    };
    let mut sim = with_states(config, &[(100, None)], 2, 10);
    let prompt: Vec<TokenId> = (0..23).collect();
    assert_eq!(cached(&mut sim, prompt.clone()), 0);
    // At 8, 16 and 22, the last end of a block before the last token.
    assert_eq!(sim.scheduler.pool().kept_states(), 3);
    let mut total = 0;
    let mut found = |sim: &mut Sim, prompt: Vec<TokenId>| {
        let now = cached(sim, prompt);
        let new = now - total;
        total = now;
        new
    };
    assert_eq!(found(&mut sim, prompt.clone()), 22);
    // Twenty tokens are in blocks, and sixteen of them have a state.
    assert_eq!(found(&mut sim, (0..20).chain([77; 5]).collect()), 16);
    // The output passed 24 tokens; there is no checkpoint after 22 tokens of another text.
    assert_eq!(found(&mut sim, (0..7).chain([77; 9]).collect()), 0);
}

#[test]
fn drafts_leave_half_of_the_checkpoints() {
    let config = SchedulerConfig {
        max_seqs: 4,
        state_checkpoint_interval: 0,
        ..CONFIG
    };
    let mut sim = with_states(config, &[(200, None)], 2, 4);
    for n in 1..5 {
        cached(&mut sim, vec![n; 9]);
    }
    assert_eq!(sim.scheduler.pool().kept_states(), 4);
    // Too short for a checkpoint of their own. All of them run, so no slot is free.
    for n in 5..9 {
        sim.add(new(0, vec![n; 2]), 60);
    }
    sim.drafts = true;
    sim.drain();
    assert!(sim.gained > 10, "{}", sim.gained);
    assert_eq!(sim.scheduler.pool().kept_states(), 2);
}

#[test]
fn the_state_that_was_used_longest_ago_goes_first() {
    let config = SchedulerConfig {
        state_checkpoint_interval: 0,
        ..CONFIG
    };
    let mut sim = with_states(config, &[(200, None)], 2, 2);
    let prompt = |n: u32| vec![n; 9];
    for n in [1, 2] {
        cached(&mut sim, prompt(n));
    }
    assert_eq!(sim.scheduler.pool().kept_states(), 2);
    let mut total = 0;
    let mut hit = |sim: &mut Sim, n| {
        let now = cached(sim, prompt(n));
        let found = now > total;
        total = now;
        found
    };
    assert!(hit(&mut sim, 1));
    // The third takes the place of the second, which was used before the first.
    assert!(!hit(&mut sim, 3));
    assert!(hit(&mut sim, 1));
    assert!(!hit(&mut sim, 2));
    assert_eq!(sim.scheduler.pool().kept_states(), 2);
}

#[test]
fn a_step_ends_where_a_state_is_kept() {
    let config = SchedulerConfig {
        state_checkpoint_interval: 10,
        ..CONFIG
    };
    let mut sim = with_states(config, &[(100, None)], 4, 8);
    sim.add(new(0, vec![5; 31]), 3);
    let mut ends = Vec::new();
    while !sim.asked.is_empty() {
        sim.step();
        ends.extend(
            sim.plan
                .sequences()
                .iter()
                .map(|scheduled| scheduled.start + scheduled.len),
        );
    }
    // The stride is rounded up to whole blocks; a chunk has at most twelve tokens.
    assert_eq!(ends, [12, 24, 28, 31, 32, 33]);
}
