//! With bidirectional attention, a step has all of a prompt.

use super::*;

const WHOLE: SchedulerConfig = SchedulerConfig {
    whole_prompts: true,
    ..CONFIG
};

proptest! {
    /// Prompts of all lengths that a step takes, some of them again, are each computed once and in one step.
    #[test]
    fn each_prompt_is_computed_in_one_step(
        lens in prop::collection::vec(1usize..=12, 1..40),
        blocks in 12usize..60,
        block_size in 1usize..5,
        limit in 1usize..20,
    ) {
        let mut scheduler = scheduler(WHOLE, blocks, block_size);
        scheduler.limit_prompts(limit);
        let (mut plan, mut batch) = (StepPlan::default(), StepBatch::default());
        let mut computed = vec![false; lens.len()];
        let mut waiting = lens.iter().enumerate();
        loop {
            // Some come while others are computed.
            for (id, &len) in waiting.by_ref().take(3) {
                let prompt = (0..len as TokenId).collect();
                let hidden = NewSequence { hidden: true, prompt_logits: true, ..new(id as u64, prompt) };
                scheduler.add(hidden).unwrap();
            }
            if scheduler.is_empty() {
                break;
            }
            scheduler.schedule(&mut plan);
            prop_assert!(!plan.sequences().is_empty() && plan.tokens() <= WHOLE.max_tokens);
            scheduler.begin(&plan, &mut batch).unwrap();
            scheduler.commit(&plan);
            for scheduled in plan.sequences() {
                let id = scheduled.seq.0 as usize;
                prop_assert_eq!((scheduled.start, scheduled.len), (0, lens[id]));
                prop_assert!(!std::mem::replace(&mut computed[id], true));
                let ended = scheduler.remove(scheduled.seq).unwrap();
                prop_assert_eq!(ended.cached(), Some(0));
            }
            scheduler.check().unwrap();
            prop_assert_eq!(scheduler.pool().cached(), 0);
        }
        prop_assert!(computed.iter().all(|computed| *computed));
    }
}

/// Short ones that keep coming do not hold up one that takes a step for itself.
#[test]
fn a_long_prompt_gets_its_step() {
    let mut scheduler = scheduler(WHOLE, 60, 4);
    let (mut plan, mut batch) = (StepPlan::default(), StepBatch::default());
    let hidden = |id, len| NewSequence {
        hidden: true,
        ..new(id, vec![1; len])
    };
    scheduler.add(hidden(0, 1)).unwrap();
    scheduler.add(hidden(1, 12)).unwrap();
    for id in 2..6 {
        scheduler.add(hidden(id, 1)).unwrap();
        scheduler.schedule(&mut plan);
        scheduler.begin(&plan, &mut batch).unwrap();
        scheduler.commit(&plan);
        let ended: Vec<_> = plan.sequences().iter().map(|s| s.seq).collect();
        for &id in &ended {
            scheduler.remove(id).unwrap();
        }
        if ended.contains(&SeqId(1)) {
            return;
        }
    }
    panic!("the long prompt waits");
}

#[test]
fn a_prompt_that_no_step_takes_is_refused() {
    let mut scheduler = scheduler(WHOLE, 60, 4);
    let error = scheduler.add(new(1, vec![1; 13])).unwrap_err();
    let expected = Error::ContextOverflow {
        requested: 13,
        capacity: 12,
    };
    assert_eq!(error.to_string(), expected.to_string());
    scheduler.add(new(1, vec![1; 12])).unwrap();
}
