// The sum of one number from each of 64 lanes, in lane order, for all of them. No subgroup
// operations: their width, and with it the order of the sum, differs between devices.

const LANES = 64u;

var<workgroup> lane_values: array<f32, LANES>;

fn lane_sum(lane: u32, value: f32) -> f32 {
    // Nobody may still be reading what an earlier sum left.
    workgroupBarrier();
    lane_values[lane] = value;
    workgroupBarrier();
    var sum = 0.0;
    for (var l = 0u; l < LANES; l++) {
        sum += lane_values[l];
    }
    return sum;
}
