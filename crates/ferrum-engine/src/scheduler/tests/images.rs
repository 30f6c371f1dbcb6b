//! Prompts with images: no step cuts one, and blocks are shared only where images are the same.

use super::*;
use crate::image_embeddings::PromptImage;

/// Some of the images, one after the other, where a prompt of this many tokens has room for them.
pub(super) fn choose(
    images: &[ImageEmbeddings],
    prompt: usize,
    dice: &mut impl FnMut(u32) -> u32,
) -> Vec<PromptImage> {
    let (mut chosen, mut free) = (Vec::new(), 0);
    while !images.is_empty() && dice(3) > 0 {
        let image = images[dice(images.len() as u32) as usize].clone();
        let start = free + dice(4) as usize;
        free = start + image.tokens();
        if free > prompt {
            break;
        }
        chosen.push(PromptImage { start, image });
    }
    chosen
}

#[test]
fn images_keep_every_invariant() {
    let shapes: [(Groups, usize); 5] = [
        (&[(12, None)], 4),
        (&[(40, None)], 1),
        (&[(6, None)], 2),
        (&[(40, None), (60, Some(7))], 1),
        (&[(20, None), (20, Some(6))], 3),
    ];
    for ((groups, block_size), seed) in shapes.into_iter().zip(40..) {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut sim = Sim::with_groups(CONFIG, groups, block_size);
        (sim.drafts, sim.ahead) = (seed % 2 == 1, seed.is_multiple_of(2));
        // Most images are longer than the prompt tokens of steps in which a sequence decodes.
        sim.scheduler.limit_prompts(3);
        let sizes = [1, 2, 3, 5, 6];
        sim.images = sizes
            .map(|tokens| ImageEmbeddings::new(tokens, vec![0.0; tokens]))
            .into();
        sim.run_random(&mut rng, 40_000);
        let counters = sim.scheduler.counters();
        sim.drain();
        assert!(sim.ended > 1000);
        assert!(counters.cached_tokens > 300, "{counters:?}");
    }
}

#[test]
fn a_long_image_waits_for_no_other_prompt() {
    let mut sim = Sim::new(CONFIG, 40, 2);
    sim.scheduler.limit_prompts(1);
    let image = ImageEmbeddings::new(9, vec![0.0; 9]);
    // Three sequences decode, so that an image of nine tokens takes all that is left of a step.
    for _ in 0..3 {
        sim.add(new(0, vec![1]), 30);
    }
    sim.step();
    let images = vec![PromptImage { start: 1, image }];
    let wanted = NewSequence {
        images,
        ..new(0, vec![0; 11])
    };
    let seen = sim.add(wanted, 1);
    for _ in 0..3 {
        assert!(sim.asked.contains_key(&seen));
        sim.step();
    }
    assert!(
        !sim.asked.contains_key(&seen),
        "a token, the image, a token"
    );
    sim.drain();
}
