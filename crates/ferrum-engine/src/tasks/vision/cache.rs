//! The images that were computed last, by the bytes of their files.

use crate::image_embeddings::ImageEmbeddings;
use std::collections::VecDeque;

/// SHA-256 of a file.
pub(super) type FileDigest = [u8; 32];

/// Most bytes of embeddings that are kept.
const MAX_BYTES: usize = 64 << 20;

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct ImageCache {
    /// The one used last comes last.
    images: VecDeque<(FileDigest, ImageEmbeddings)>,
    bytes: usize,
}

impl ImageCache {
    /// The embeddings of a file.
    pub(super) fn get(&mut self, file: &FileDigest) -> Option<ImageEmbeddings> {
        let place = self.images.iter().position(|(known, _)| known == file)?;
        let entry = self.images.remove(place)?;
        let found = entry.1.clone();
        self.images.push_back(entry);
        Some(found)
    }

    /// Keeps those of another file; those that were not used for longest make room.
    pub(super) fn insert(&mut self, file: FileDigest, image: ImageEmbeddings) {
        self.bytes += size_of_val(image.values());
        self.images.push_back((file, image));
        while self.bytes > MAX_BYTES {
            let Some((_, oldest)) = self.images.pop_front() else {
                return;
            };
            self.bytes -= size_of_val(oldest.values());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_image_that_was_used_least_recently_goes_first() {
        let mut cache = ImageCache::default();
        let quarter = MAX_BYTES / 16;
        for file in 0..4 {
            cache.insert([file; 32], ImageEmbeddings::new(1, vec![0.0; quarter]));
        }
        let first = cache.get(&[0; 32]).unwrap();
        cache.insert([4; 32], ImageEmbeddings::new(1, vec![0.0; quarter]));
        assert_eq!(cache.get(&[1; 32]), None);
        assert_eq!(cache.get(&[0; 32]).unwrap().cache_key(), first.cache_key());
        assert!(cache.bytes <= MAX_BYTES);
        // One that is too large by itself is not kept, nor is anything else then.
        cache.insert([9; 32], ImageEmbeddings::new(1, vec![0.0; 5 * quarter]));
        assert_eq!((cache.bytes, cache.images.len()), (0, 0));
    }
}
