//! What is being answered now, for `/slots`: how far each answer has come and with which samplers, never its text.
//!
//! The engine has no slots; each running choice keeps a stable slot number for `/slots`.

use crate::generation::sampler_settings::sampler_settings;
use crate::response::{Slot, SlotProgress, SlotSettings};
use ferrum_engine::GenerationParams;
use ferrum_engine::engine::Progress;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// An answer, for as long as it is being generated.
#[derive(Debug)]
pub(crate) struct SlotTask {
    id: u64,
    params: SlotSettings,
    tokens: AtomicUsize,
    has_new_line: AtomicBool,
    progress: Arc<Progress>,
}

impl SlotSettings {
    /// The settings of an answer, as far as they say nothing of what it is about: no stop strings, tokens or grammars.
    pub(crate) fn of(generation: &GenerationParams) -> Self {
        Self {
            samplers: sampler_settings(&generation.sampling),
            n_predict: generation.max_tokens,
            max_tokens: generation.max_tokens,
        }
    }
}

impl SlotTask {
    /// A token with the text that is certain since.
    pub(crate) fn token(&self, text: &str) {
        self.tokens.fetch_add(1, Ordering::Relaxed);
        if text.contains('\n') {
            self.has_new_line.store(true, Ordering::Relaxed);
        }
    }

    fn next_token(&self) -> SlotProgress {
        let tokens = self.tokens.load(Ordering::Relaxed);
        SlotProgress {
            has_next_token: true,
            has_new_line: self.has_new_line(),
            n_remain: self.params.max_tokens.saturating_sub(tokens),
            n_decoded: tokens,
        }
    }

    pub(crate) fn has_new_line(&self) -> bool {
        self.has_new_line.load(Ordering::Relaxed)
    }
}

/// The answers of a model. Those that have ended are gone by themselves.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    last: AtomicU64,
    places: Mutex<Places>,
}

#[derive(Debug, Default)]
struct Places {
    /// Those that were not seen in a place yet.
    unplaced: Vec<Weak<SlotTask>>,
    placed: Vec<Weak<SlotTask>>,
}

impl Slots {
    /// Takes note of the answers to a prompt.
    pub(crate) fn begin(
        &self,
        params: &SlotSettings,
        progress: &Arc<Progress>,
        n: usize,
    ) -> Vec<Arc<SlotTask>> {
        let task = |_| {
            Arc::new(SlotTask {
                id: self.last.fetch_add(1, Ordering::Relaxed),
                params: params.clone(),
                tokens: AtomicUsize::new(0),
                has_new_line: AtomicBool::new(false),
                progress: Arc::clone(progress),
            })
        };
        let tasks: Vec<_> = (0..n).map(task).collect();
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        places.unplaced.retain(|task| task.strong_count() > 0);
        places.unplaced.extend(tasks.iter().map(Arc::downgrade));
        tasks
    }

    /// `count` places of `context` tokens each, in llama.cpp's shape.
    pub(crate) fn list(&self, count: usize, context: usize) -> Vec<Slot> {
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let tasks = places.assign(count);
        let slots = tasks.into_iter().enumerate().map(|(id, task)| {
            let task = task.as_ref();
            Slot {
                id,
                n_ctx: context,
                speculative: false,
                is_processing: task.is_some(),
                id_task: task.map(|task| task.id),
                params: task.map(|task| task.params.clone()),
                next_token: task.map(|task| task.next_token()),
            }
        });
        slots.collect()
    }
}

impl Places {
    /// Who is in which place: those that have begun take free ones.
    fn assign(&mut self, count: usize) -> Vec<Option<Arc<SlotTask>>> {
        self.placed.resize_with(count, Weak::new);
        let mut tasks: Vec<_> = self.placed.iter().map(Weak::upgrade).collect();
        let mut free = (0..count).filter(|&place| tasks[place].is_none());
        let mut newly = Vec::new();
        self.unplaced.retain(|task| {
            let Some(strong) = task.upgrade() else {
                return false;
            };
            if strong.progress.queued().is_none() {
                return true;
            }
            match free.next() {
                Some(place) => {
                    newly.push((place, strong));
                    false
                }
                None => true,
            }
        });
        drop(free);
        for (place, task) in newly {
            self.placed[place] = Arc::downgrade(&task);
            tasks[place] = Some(task);
        }
        tasks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_waits_and_what_has_ended_has_no_place() {
        let slots = Slots::default();
        let params = SlotSettings::of(&GenerationParams::default());
        let begin = |n| slots.begin(&params, &Arc::default(), n);
        // Nothing has begun.
        let waiting = begin(1);
        let listed = slots.list(2, 64);
        assert!(listed.iter().all(|slot| !slot.is_processing));
        assert_eq!(listed[1].n_ctx, 64);
        drop(waiting);
        let mut places = slots.places.lock().unwrap();
        assert_eq!(places.assign(3).len(), 3);
        assert!(places.unplaced.is_empty());
    }
}
