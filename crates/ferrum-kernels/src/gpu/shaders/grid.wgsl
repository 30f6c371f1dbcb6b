// A grid has two dimensions, because one holds at most 65535 workgroups; workgroups beyond the
// wanted number return at once.

struct Place {
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
}

fn group_of(at: Place) -> u32 {
    return at.group.y * at.groups.x + at.group.x;
}

// For shaders in which each of 256 lanes makes one element.
fn element_of(at: Place) -> u32 {
    return group_of(at) * 256u + at.lane;
}
