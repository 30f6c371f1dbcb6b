//! Cache groups with a window: the books hold under random operations, and a long prompt takes no more than it needs.

use super::*;

/// With pools of windows that are roomy, short and too short for a chunk.
#[test]
fn windows_keep_every_invariant() {
    let shapes: [(Groups, usize); 6] = [
        (&[(12, None), (12, Some(5))], 4),
        (&[(40, None), (18, Some(7))], 1),
        (&[(30, None), (8, Some(4)), (10, Some(9))], 3),
        (&[(9, Some(3))], 2),
        (&[(24, Some(6))], 2),
        (&[(20, None), (3, Some(4))], 3),
    ];
    for ((groups, block_size), seed) in shapes.into_iter().zip(20..) {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut sim = Sim::with_groups(CONFIG, groups, block_size);
        (sim.drafts, sim.ahead) = (seed % 2 == 1, seed.is_multiple_of(2));
        sim.run_random(&mut rng, 60_000);
        let counters = sim.scheduler.counters();
        sim.drain();
        assert!(sim.ended > 1000);
        assert!(!sim.drafts || sim.gained > 500, "{}", sim.gained);
        assert!(!sim.ahead || sim.overlapped > 3000, "{}", sim.overlapped);
        assert!(counters.cached_tokens > 300, "{counters:?}");
    }
}

#[test]
fn a_window_holds_what_it_needs_of_a_long_prompt() {
    let config = SchedulerConfig {
        context: 400,
        ..CONFIG
    };
    // Six blocks: those of the seven tokens before a chunk, and those of a chunk of twelve.
    let groups = [(100, None), (6, Some(8))];
    let mut sim = Sim::with_groups(config, &groups, 4);
    let long = sim.add(new(0, (0..300).collect()), 60);
    let mut steps = 0;
    while sim.asked.contains_key(&long) {
        sim.step();
        steps += 1;
        let used = sim.scheduler.pool().used_of(1);
        assert!(used <= 3, "{used}");
    }
    assert_eq!(steps, 25 + 59, "no chunk was cut short");
    assert_eq!(sim.scheduler.counters().preemptions, 0);
    // The same again has its prefix in the cache, though the window has no more than its end.
    let again = sim.add(new(0, (0..290).collect()), 3);
    sim.step();
    let cached = sim.scheduler.sequence(again).and_then(|seq| seq.cached());
    assert_eq!(
        cached,
        Some(0),
        "what is before the end has left the window's pool"
    );
    sim.drain();
    let again = sim.add(new(0, (0..290).collect()), 3);
    sim.step();
    let cached = sim.scheduler.sequence(again).and_then(|seq| seq.cached());
    assert_eq!(cached, Some(288));
    sim.drain();
}
