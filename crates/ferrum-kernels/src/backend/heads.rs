//! What happens to heads between a projection and attention, as it travels with an op.

use super::Backend;
use ferrum_types::RopeStyle;

/// Rotary position embedding by table.
///
/// Row `r = rows[token]` of the tables holds `rot_dim/2` factors; any scaling (also of the
/// magnitude, as in YaRN) is in the tables already. Only the first `rot_dim` elements of a head are
/// rotated. Source: Su et al., "RoFormer".
pub struct Rope<'a, B: Backend> {
    /// `[table_rows, rot_dim/2]`, cosines.
    pub cos: &'a B::Buffer<f32>,
    /// `[table_rows, rot_dim/2]`, sines.
    pub sin: &'a B::Buffer<f32>,
    /// `[tokens]`, each token's row in the tables; normally its position.
    pub rows: &'a B::Buffer<i32>,
    /// Rotated elements of a head: even, at most `head_dim`.
    pub rot_dim: usize,
    /// Pairing.
    pub style: RopeStyle,
}

/// RMS norm of each head before the rotation (Qwen3, Gemma 3).
pub struct QkNorm<'a, B: Backend> {
    /// `[head_dim]`.
    pub weight: &'a B::Buffer<f32>,
    /// Added to the mean square.
    pub eps: f32,
}

/// What happens to q and k between the projection and attention: norm, then rotation; each optional.
pub struct QkvTransform<'a, B: Backend> {
    /// Norm of query heads.
    pub q_norm: Option<QkNorm<'a, B>>,
    /// Norm of key heads.
    pub k_norm: Option<QkNorm<'a, B>>,
    /// Rotation of query and key heads.
    pub rope: Option<Rope<'a, B>>,
}

impl<B: Backend> QkvTransform<'_, B> {
    /// q and k as they are.
    pub fn none() -> Self {
        Self {
            q_norm: None,
            k_norm: None,
            rope: None,
        }
    }
}

macro_rules! copy_of_references {
    ($($t:ident),*) => {$(
        impl<B: Backend> Clone for $t<'_, B> {
            fn clone(&self) -> Self {
                *self
            }
        }
        impl<B: Backend> Copy for $t<'_, B> {}
    )*};
}
copy_of_references!(Rope, QkNorm, QkvTransform);
