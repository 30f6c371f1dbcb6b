//! Numbers of blocks or slots in order of their last use, with every operation in constant time.

/// End of the list.
const NONE: u32 = u32::MAX;

/// A doubly linked list of numbers over a fixed array.
#[derive(Debug)]
pub(super) struct LruList {
    links: Vec<Link>,
    oldest: u32,
    newest: u32,
    len: usize,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    older: u32,
    newer: u32,
    listed: bool,
}

impl LruList {
    /// An empty list of numbers below `count`.
    pub(super) fn new(count: usize) -> Self {
        let link = Link {
            older: NONE,
            newer: NONE,
            listed: false,
        };
        Self {
            links: vec![link; count],
            oldest: NONE,
            newest: NONE,
            len: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn contains(&self, number: u32) -> bool {
        self.links[number as usize].listed
    }

    /// Adds a number that is not in the list.
    pub(super) fn push_newest(&mut self, number: u32) {
        debug_assert!(!self.contains(number));
        let before = std::mem::replace(&mut self.newest, number);
        self.links[number as usize] = Link {
            older: before,
            newer: NONE,
            listed: true,
        };
        match before {
            NONE => self.oldest = number,
            _ => self.links[before as usize].newer = number,
        }
        self.len += 1;
    }

    /// Removes the number that was added first.
    pub(super) fn pop_oldest(&mut self) -> Option<u32> {
        let number = (self.oldest != NONE).then_some(self.oldest)?;
        self.remove(number);
        Some(number)
    }

    /// Removes a number that is in the list.
    pub(super) fn remove(&mut self, number: u32) {
        debug_assert!(self.contains(number));
        let Link { older, newer, .. } = self.links[number as usize];
        self.links[number as usize].listed = false;
        match older {
            NONE => self.oldest = newer,
            _ => self.links[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            _ => self.links[newer as usize].older = older,
        }
        self.len -= 1;
    }

    /// Oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let first = (self.oldest != NONE).then_some(self.oldest);
        let next = |&at: &u32| Some(self.links[at as usize].newer).filter(|&n| n != NONE);
        // A broken list must not hang the check that looks for it.
        std::iter::successors(first, next).take(self.links.len() + 1)
    }
}
