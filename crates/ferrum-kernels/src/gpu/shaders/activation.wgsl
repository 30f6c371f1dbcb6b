// Activation functions that stay finite: no device is asked for an infinity, because some assume
// that there is none.

// (1 - e^-2x) / (1 + e^-2x), and near zero, where that cancels, the series.
fn tanh_of(x: f32) -> f32 {
    let s = x * x;
    if s < 0.04 {
        return x * (1.0 + s * (-1.0 / 3.0 + s * (2.0 / 15.0 + s * (-17.0 / 315.0))));
    }
    let e = exp(-2.0 * min(abs(x), 20.0));
    return sign(x) * (1.0 - e) / (1.0 + e);
}

// Abramowitz and Stegun 7.1.26: absolute error below 1.5e-7.
fn erf_of(x: f32) -> f32 {
    let a = abs(x);
    let t = 1.0 / (1.0 + 0.3275911 * a);
    let poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741
        + t * (-1.453152027 + t * 1.061405429))));
    return sign(x) * (1.0 - poly * exp(-min(a * a, 80.0)));
}

fn gelu(x: f32) -> f32 {
    return 0.5 * x * (1.0 + erf_of(x * 0.70710678));
}

fn gelu_tanh(x: f32) -> f32 {
    return 0.5 * x * (1.0 + tanh_of(0.79788456 * (x + 0.044715 * x * x * x)));
}

fn silu(x: f32) -> f32 {
    return x / (1.0 + exp(min(-x, 80.0)));
}

// The numbers are those of `number` on the host.
fn activation(kind: u32, x: f32) -> f32 {
    switch kind {
        case 0u: {
            return gelu(x);
        }
        case 1u: {
            return gelu_tanh(x);
        }
        case 2u: {
            return silu(x);
        }
        case 3u: {
            return tanh_of(x);
        }
        case 5u: {
            return 1.0 / (1.0 + exp(min(-x, 80.0)));
        }
        default: {
            return x;
        }
    }
}
