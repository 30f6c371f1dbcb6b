//! Sequences keep their places in a step.

use super::*;

fn order(sim: &Sim) -> Vec<SeqId> {
    sim.plan
        .sequences()
        .iter()
        .map(|scheduled| scheduled.seq)
        .collect()
}

#[test]
fn whoever_leaves_is_replaced_by_the_last_and_nobody_else_moves() {
    let config = SchedulerConfig {
        max_tokens: 64,
        max_logit_rows: 64,
        max_seqs: 6,
        ..CONFIG
    };
    let mut sim = Sim::new(config, 200, 4);
    let ids: Vec<_> = (0..6).map(|i| sim.add(new(0, vec![i; 5]), 90)).collect();
    sim.step();
    assert_eq!(order(&sim), ids);
    sim.end(ids[1]);
    let urgent = NewSequence {
        priority: 5,
        ..new(0, vec![9; 3])
    };
    // Its rank is the first, and it comes to the place of the last.
    let urgent = sim.add(urgent, 90);
    sim.step();
    let expected = [ids[0], ids[5], ids[2], ids[3], ids[4], urgent];
    assert_eq!(order(&sim), expected);
    sim.end(urgent);
    sim.end(ids[0]);
    for _ in 0..3 {
        sim.step();
        assert_eq!(order(&sim), [ids[4], ids[5], ids[2], ids[3]]);
        sim.scheduler.check().unwrap();
    }
}
