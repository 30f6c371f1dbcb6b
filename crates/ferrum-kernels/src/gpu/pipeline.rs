//! Shaders: how their text is put together, and the caches of what is made from it.
//!
//! A [`Kernel`] is a list of WGSL texts that follow one another; what differs between forms of one
//! idea (a weight's element type, the layout of a cache) is a text of its own that fills in the
//! functions which the others call. Tile sizes and operators are constants written in front, so a
//! compiler sees them as such. Group 0 holds the parameters, group 1 the buffers.

use std::collections::HashMap;
use std::fmt::Write;
use std::sync::Arc;

/// Most buffers that a shader binds: what WebGPU promises of every device.
pub(super) const MAX_BINDINGS: usize = 8;

/// Bytes of parameters that a dispatch can have.
pub(super) const PARAM_BYTES: u32 = 128;

/// A compute shader.
pub(super) struct Kernel {
    /// Unique name.
    pub(super) name: &'static str,
    /// Texts, in order.
    pub(super) wgsl: &'static [&'static str],
    /// One letter for each binding of group 1: `r`ead or read-and-`w`rite.
    pub(super) access: &'static str,
    /// Names of the `u32` constants written in front.
    pub(super) constants: &'static [&'static str],
}

impl Kernel {
    /// The whole text with values for the constants.
    pub(super) fn source(&self, constants: &[u32]) -> String {
        debug_assert_eq!(self.constants.len(), constants.len());
        let mut text = String::new();
        for (name, value) in self.constants.iter().zip(constants) {
            let _ = writeln!(text, "const {name}: u32 = {value}u;");
        }
        for part in self.wgsl {
            text.push_str(part);
            text.push('\n');
        }
        text
    }
}

/// A compiled [`Kernel`].
pub(super) struct Pipeline {
    pub(super) compute: wgpu::ComputePipeline,
    access: &'static str,
    buffers: wgpu::BindGroupLayout,
}

#[derive(PartialEq, Eq, Hash)]
struct PipelineKey {
    name: &'static str,
    constants: [u32; 2],
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct BindKey {
    access: &'static str,
    ids: [u64; MAX_BINDINGS],
}

/// Compiled shaders and bind groups of a device, made when first asked for.
pub(super) struct Pipelines {
    pub(super) params: wgpu::BindGroupLayout,
    layouts: HashMap<&'static str, wgpu::BindGroupLayout>,
    pipelines: HashMap<PipelineKey, Arc<Pipeline>>,
    groups: HashMap<BindKey, wgpu::BindGroup>,
    /// The groups that a buffer takes part in.
    groups_of: HashMap<u64, Vec<BindKey>>,
}

fn entry(binding: u32, ty: wgpu::BufferBindingType, dynamic: bool) -> wgpu::BindGroupLayoutEntry {
    wgpu::BindGroupLayoutEntry {
        binding,
        visibility: wgpu::ShaderStages::COMPUTE,
        ty: wgpu::BindingType::Buffer {
            ty,
            has_dynamic_offset: dynamic,
            min_binding_size: None,
        },
        count: None,
    }
}

impl Pipelines {
    pub(super) fn new(device: &wgpu::Device) -> Self {
        let params = device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
            label: Some("params"),
            entries: &[entry(0, wgpu::BufferBindingType::Uniform, true)],
        });
        Self {
            params,
            layouts: HashMap::new(),
            pipelines: HashMap::new(),
            groups: HashMap::new(),
            groups_of: HashMap::new(),
        }
    }

    /// The compiled form of `kernel` with these constants.
    pub(super) fn pipeline(
        &mut self,
        device: &wgpu::Device,
        kernel: &'static Kernel,
        constants: &[u32],
    ) -> Arc<Pipeline> {
        let mut key = PipelineKey {
            name: kernel.name,
            constants: [0; 2],
        };
        for (to, from) in key.constants.iter_mut().zip(constants) {
            *to = *from;
        }
        if let Some(found) = self.pipelines.get(&key) {
            return Arc::clone(found);
        }
        let made = Arc::new(self.compile(device, kernel, constants));
        self.pipelines.insert(key, Arc::clone(&made));
        made
    }

    fn compile(
        &mut self,
        device: &wgpu::Device,
        kernel: &'static Kernel,
        constants: &[u32],
    ) -> Pipeline {
        let buffers = self.layout(device, kernel.access);
        let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
            label: Some(kernel.name),
            source: wgpu::ShaderSource::Wgsl(kernel.source(constants).into()),
        });
        let layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: Some(kernel.name),
            bind_group_layouts: &[Some(&self.params), Some(&buffers)],
            immediate_size: 0,
        });
        let compute = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(kernel.name),
            layout: Some(&layout),
            module: &module,
            entry_point: Some("main"),
            compilation_options: wgpu::PipelineCompilationOptions {
                constants: &[],
                // Every shader writes its workgroup memory before it reads it.
                zero_initialize_workgroup_memory: false,
            },
            cache: None,
        });
        Pipeline {
            compute,
            access: kernel.access,
            buffers,
        }
    }

    fn layout(&mut self, device: &wgpu::Device, access: &'static str) -> wgpu::BindGroupLayout {
        let make = || {
            let entries: Vec<_> = (0..)
                .zip(access.bytes())
                .map(|(binding, a)| {
                    let read_only = a == b'r';
                    entry(
                        binding,
                        wgpu::BufferBindingType::Storage { read_only },
                        false,
                    )
                })
                .collect();
            device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
                label: Some(access),
                entries: &entries,
            })
        };
        self.layouts.entry(access).or_insert_with(make).clone()
    }

    /// The bind group of `buffers` (whole, as `(id, buffer)`) for `pipeline`.
    pub(super) fn bind_group(
        &mut self,
        device: &wgpu::Device,
        pipeline: &Pipeline,
        buffers: &[(u64, &wgpu::Buffer)],
    ) -> wgpu::BindGroup {
        let mut key = BindKey {
            access: pipeline.access,
            ids: [0; MAX_BINDINGS],
        };
        for (to, (id, _)) in key.ids.iter_mut().zip(buffers) {
            *to = *id;
        }
        if let Some(found) = self.groups.get(&key) {
            return found.clone();
        }
        let entries: Vec<_> = (0..)
            .zip(buffers)
            .map(|(binding, (_, buffer))| wgpu::BindGroupEntry {
                binding,
                resource: buffer.as_entire_binding(),
            })
            .collect();
        let group = device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some(pipeline.access),
            layout: &pipeline.buffers,
            entries: &entries,
        });
        for (id, _) in buffers {
            self.groups_of.entry(*id).or_default().push(key);
        }
        self.groups.insert(key, group.clone());
        group
    }

    /// Drops every bind group that holds the buffer.
    pub(super) fn forget_buffer(&mut self, id: u64) {
        for key in self.groups_of.remove(&id).unwrap_or_default() {
            self.groups.remove(&key);
            for other in key.ids.iter().filter(|other| **other != id) {
                if let Some(keys) = self.groups_of.get_mut(other) {
                    keys.retain(|k| *k != key);
                }
            }
        }
    }

    #[cfg(test)]
    pub(super) fn cached_groups(&self) -> usize {
        self.groups.len()
    }
}
