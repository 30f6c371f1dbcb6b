//! Linear attention of a Hugging Face folder as GGUF files have it.
//!
//! Projections that folders join by heads are joined as products are computed. Qwen 3.5 has value heads in turns of key
//! heads, where folders have those of a key head together. Decays are negative numbers, where folders have logarithms.
//! The numbers of a state space's heads are columns, and its norm has a row for each group.

use super::hf_model::HfModel;
use super::item::{From, Item, Part, number_type};
use crate::inventory::{DecoderTensor, TensorId, TensorLocation, TensorRole};
use crate::spec::{AttentionSpec, LinearAttentionSpec};
use crate::stored::{require, to_f32};
use ferrum_formats::TensorSource;
use ferrum_kernels::LinearAttentionRule;
use ferrum_types::{Error, Result};
use std::collections::HashSet;

/// The tensors of all layers with linear attention, but for those that are in both kinds of file alike.
///
/// Adds the tensors of the folder that they are made of to `used`.
pub(super) fn items(model: &HfModel<'_>, used: &mut HashSet<String>) -> Result<Vec<Item>> {
    let mut items = Vec::new();
    for (layer, spec) in model.spec.layers.iter().enumerate() {
        if let AttentionSpec::Linear(linear) = &spec.attention {
            let mut layer = Layer {
                model,
                linear,
                layer,
                used,
            };
            layer.add(&mut items)?;
        }
    }
    Ok(items)
}

/// A layer with linear attention.
struct Layer<'a, 'm> {
    model: &'a HfModel<'m>,
    linear: &'a LinearAttentionSpec,
    layer: usize,
    used: &'a mut HashSet<String>,
}

impl Layer<'_, '_> {
    fn add(&mut self, items: &mut Vec<Item>) -> Result<()> {
        let is_delta = self.linear.rule == LinearAttentionRule::GatedDelta;
        if is_delta {
            let first = [
                TensorRole::LinearQuery,
                TensorRole::LinearKey,
                TensorRole::LinearValue,
            ];
            items.push(self.matrix(self.model.gguf_names.joined.linear_qkv, &first)?);
            items.push(self.matrix(None, &[TensorRole::LinearGate])?);
            // Qwen3-Next keeps them joined.
            if self.model.arch != "qwen3next" {
                items.push(self.matrix(None, &[TensorRole::LinearBeta])?);
                items.push(self.matrix(None, &[TensorRole::LinearStep])?);
            }
        }
        items.push(self.convolution()?);
        let shape = |len| if is_delta { vec![len] } else { vec![len, 1] };
        let heads = self.linear.value_heads;
        for (role, shape) in [
            (TensorRole::LinearDecay, shape(heads)),
            (TensorRole::LinearStepBias, vec![heads]),
            (TensorRole::LinearSkip, shape(heads)),
        ] {
            if let Some(tensor) = self.tensor(role) {
                items.push(self.of_heads(&tensor, shape)?);
            }
        }
        if !is_delta && let Some(tensor) = self.tensor(TensorRole::LinearNorm) {
            let groups = self.linear.norm_rows();
            let shape = vec![groups, self.linear.norm_dim() / groups];
            items.push(self.of_heads(&tensor, shape)?);
        }
        let mut out = self.matrix(None, &[TensorRole::LinearOutput])?;
        if let From::Rows { rows, cols, .. } = &mut out.from {
            let width = self.linear.values();
            *rows = None;
            *cols = Some(self.turned(0, width));
        }
        items.push(out);
        Ok(())
    }

    fn tensor(&self, role: TensorRole) -> Option<DecoderTensor> {
        let id = TensorId::in_layer(self.layer, role);
        self.model.spec.tensor(id)
    }

    /// The place of each of `len` numbers, or rows, of value heads, which are behind the first `first`.
    fn turned(&self, first: usize, len: usize) -> Vec<usize> {
        let in_turns = self.model.arch.starts_with("qwen35");
        let place = |at| match in_turns {
            true => first + self.linear.grouped_place(at, len),
            false => first + at,
        };
        (0..len).map(place).collect()
    }

    /// A name in the new file: that of the first role, unless there is one of them all.
    fn name(&self, joined: Option<&str>, role: TensorRole) -> String {
        let names = self.model.gguf_names;
        let id = TensorId::in_layer(self.layer, role);
        let layer = names.layer.replace("{}", &self.layer.to_string());
        match joined {
            Some(stem) => format!("{layer}.{stem}.weight"),
            None => names.name(id).unwrap_or_default(),
        }
    }

    /// Maps of the folder, one below the other.
    fn matrix(&mut self, joined: Option<&str>, roles: &[TensorRole]) -> Result<Item> {
        let mut source: Option<String> = None;
        let mut rows = Vec::new();
        let mut cols = 0;
        for &role in roles {
            let Some((tensor, shape)) = self.tensor(role).and_then(|t| Some((t, t.matrix()?)))
            else {
                continue;
            };
            let (name, places) = self.place(&tensor)?;
            rows.extend(match role {
                TensorRole::LinearValue
                | TensorRole::LinearGate
                | TensorRole::LinearBeta
                | TensorRole::LinearStep => {
                    let order = self.turned(0, shape.rows).into_iter();
                    order.map(|row| places[row]).collect()
                }
                _ => places,
            });
            cols = shape.cols;
            if source.get_or_insert_with(|| name.clone()) != &name {
                return Err(self.unsaid(&tensor));
            }
        }
        let name = source.unwrap_or_default();
        let view = self.model.folder.tensors.require(&name)?;
        self.used.insert(name.clone());
        Ok(Item {
            name: self.name(joined, roles[0]),
            shape: vec![rows.len(), cols],
            from: From::Rows {
                parts: vec![Part { name, first: 0 }],
                ty: number_type(view.dtype),
                pairs: 0,
                columns: None,
                rows: Some(rows),
                cols: None,
            },
        })
    }

    /// The tensor of the folder that has a map, and where its rows are in it.
    fn place(&self, tensor: &DecoderTensor) -> Result<(String, Vec<usize>)> {
        let tensors = &self.model.folder.tensors;
        let rows = 0..tensor.shape.dims()[0];
        let places = self.model.names.locations(tensor).into_iter();
        let mut found = places.filter_map(|place| {
            let (name, rows): (_, Vec<_>) = match place {
                TensorLocation::Whole(name) => (name, rows.clone().collect()),
                TensorLocation::Rows { name, first, .. } => {
                    (name, rows.clone().map(|row| first + row).collect())
                }
                TensorLocation::Runs { name, runs, .. } => {
                    (name, rows.clone().map(|row| runs.row(row)).collect())
                }
                TensorLocation::PerExpert(_) | TensorLocation::Reordered { .. } => return None,
            };
            tensors.get(&name).is_some().then_some((name, rows))
        });
        found.next().ok_or_else(|| self.unsaid(tensor))
    }

    /// The taps of the convolution, whose channels are queries, keys and values.
    fn convolution(&mut self) -> Result<Item> {
        let channels = self.linear.row_dim();
        let values = self.linear.values();
        let mut rows: Vec<_> = (0..channels).collect();
        if self.linear.rule == LinearAttentionRule::GatedDelta {
            let first = channels - values;
            rows.truncate(first);
            rows.extend(self.turned(first, values));
        }
        let role = TensorRole::LinearConv;
        let name = self.model.names.name(TensorId::in_layer(self.layer, role));
        let name = name.unwrap_or_default();
        let view = self.model.folder.tensors.require(&name)?;
        self.used.insert(name.clone());
        Ok(Item {
            name: self.name(None, role),
            // The one input of each channel is not said.
            shape: vec![channels, self.linear.kernel],
            from: From::Rows {
                parts: vec![Part { name, first: 0 }],
                ty: number_type(view.dtype),
                pairs: 0,
                columns: None,
                rows: Some(rows),
                cols: None,
            },
        })
    }

    /// Numbers of heads.
    fn of_heads(&mut self, tensor: &DecoderTensor, shape: Vec<usize>) -> Result<Item> {
        let tensors = &self.model.folder.tensors;
        let (name, _) = self.place(tensor)?;
        let view = require(tensors, &name, &tensor.shape.dims())?;
        let mut values = to_f32(tensors, &view)?;
        if tensor.id.role == TensorRole::LinearDecay && self.model.names.linear.log_decay {
            values.iter_mut().for_each(|value| *value = -value.exp());
        }
        if values.len() == self.linear.value_heads {
            let order = self.turned(0, values.len()).into_iter();
            values = order.map(|head| values[head]).collect();
        }
        self.used.insert(name);
        Ok(Item {
            name: self.name(None, tensor.id.role),
            shape,
            from: From::Values(values),
        })
    }

    fn unsaid(&self, tensor: &DecoderTensor) -> Error {
        let path = self.model.folder.tensors.path_hint().display();
        Error::Model(format!(
            "{path}: {}: is in no place that folders of this architecture have for it",
            tensor.id
        ))
    }
}
