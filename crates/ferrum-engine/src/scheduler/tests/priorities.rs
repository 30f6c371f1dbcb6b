//! Who goes before whom, and at whose cost.

use super::*;

#[test]
fn a_flood_of_urgent_requests_starves_nobody() {
    let config = SchedulerConfig {
        max_seqs: 2,
        ..CONFIG
    };
    let mut sim = Sim::new(config, 40, 2);
    let patient = sim.add(
        NewSequence {
            priority: -1,
            ..new(0, vec![5; 4])
        },
        3,
    );
    let mut waited = 0;
    while sim.asked.contains_key(&patient) {
        while sim.asked.len() < 6 {
            sim.add(
                NewSequence {
                    priority: 1,
                    ..new(0, vec![6; 4])
                },
                4,
            );
        }
        sim.step();
        waited += 1;
    }
    // Two levels of head start, and then those that were there before.
    assert!((100..140).contains(&waited), "{waited}");
}

#[test]
fn an_urgent_request_takes_the_place_of_a_lesser_one() {
    let config = SchedulerConfig {
        max_seqs: 1,
        ..CONFIG
    };
    let mut sim = Sim::new(config, 20, 2);
    let lesser = sim.add(new(0, vec![1; 4]), 30);
    sim.step();
    let urgent = sim.add(
        NewSequence {
            priority: 1,
            ..new(0, vec![2; 4])
        },
        2,
    );
    sim.step();
    assert_eq!(sim.plan.preempted(), [lesser]);
    assert_eq!(sim.plan.sequences()[0].seq, urgent);
    sim.drain();
}

#[test]
fn nobody_loses_a_place_that_does_not_help() {
    let config = SchedulerConfig {
        max_tokens: 64,
        ..CONFIG
    };
    // Needs more blocks than the lesser one has for itself, and fewer than it has with those it shares.
    for (needed, helps) in [(5, true), (7, false)] {
        let mut sim = Sim::new(config, 10, 4);
        let prompt: Vec<_> = (0..14).collect();
        let urgent = |priority, prompt| NewSequence {
            priority,
            ..new(0, prompt)
        };
        sim.add(urgent(2, prompt.clone()), 9);
        sim.step();
        let lesser = sim.add(urgent(0, prompt), 9);
        sim.step();
        let seq = sim.scheduler.sequence(lesser).unwrap();
        assert_eq!((seq.cached(), seq.table.blocks().len()), (Some(12), 4));
        assert_eq!(sim.scheduler.pool().available(), 5);
        let pusher = sim.add(urgent(1, vec![99; needed * 4]), 2);
        sim.step();
        let expected: &[SeqId] = if helps { &[lesser] } else { &[] };
        assert_eq!(sim.plan.preempted(), expected);
        let worked = sim
            .plan
            .sequences()
            .iter()
            .any(|scheduled| scheduled.seq == pusher);
        assert_eq!(worked, helps);
        sim.drain();
    }
}
