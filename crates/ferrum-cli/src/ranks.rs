//! `--tensor-parallel`: the ranks that compute a model together.
//!
//! Under `mpirun`, each process is a rank; without it, the others are threads of this process. Rank 0 is the command, which
//! runs as it does alone and finds the group where it opens a device. The others read nothing of the command but
//! its devices: rank 0 says what they load, and they print nothing but what went wrong.

use crate::args::PlacementArgs;
use crate::failure::{Failure, Outcome};
use crate::{demo_model, ui};
use ferrum_engine::{
    BackendOptions, Placement, RankDevice, Ranks, rank_options, serve_rank, shut_down_ranks,
};
use ferrum_formats::ModelSource;
use ferrum_kernels::{GroupHandle, LocalGroup};
use ferrum_models::{Model, read_model};
use ferrum_mpi::World;
use ferrum_types::Error;
use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;

/// The group of this process, which it has from its start to its end.
static GROUP: OnceLock<Group> = OnceLock::new();

struct Group {
    /// This rank's end.
    end: GroupHandle,
    /// Number of this rank among those on this machine, and how many they are.
    local: (usize, usize),
    members: Members,
}

/// What the ranks are.
enum Members {
    Processes(World),
    /// Those that are not the first.
    Threads(Mutex<Vec<JoinHandle<()>>>),
}

/// What this process is to do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Run the command.
    Lead,
    /// Follow rank 0.
    Follow,
}

/// Meets the other ranks that the arguments of a command ask for, if they do.
pub(crate) fn begin(placement: Option<&PlacementArgs>) -> Outcome<Role> {
    let Some(placement) = placement else {
        return Ok(Role::Lead);
    };
    let wanted = usize::from(placement.tensor_parallel);
    let group = match ferrum_mpi::launched().filter(|&processes| processes > 1) {
        None if wanted == 1 => return Ok(Role::Lead),
        None => threads(wanted, placement)?,
        Some(processes) if processes == wanted => {
            let world = World::join()?;
            Group {
                end: world.group(),
                local: (world.local_rank(), world.local_size()),
                members: Members::Processes(world),
            }
        }
        Some(processes) => {
            return Err(Failure::new(format!(
                "found {processes} processes that were started together, expected {wanted} for as many ranks\nhint: \
                 --tensor-parallel {processes} has them compute one model"
            )));
        }
    };
    let role = match group.end.rank() {
        0 => Role::Lead,
        _ => Role::Follow,
    };
    GROUP.get_or_init(|| group);
    Ok(role)
}

/// A group whose other ranks are threads, which begin to wait for what they are told.
fn threads(ranks: usize, placement: &PlacementArgs) -> Outcome<Group> {
    let mut ends = LocalGroup::ranks(ranks).into_iter();
    let first = ends.next();
    let first = first.ok_or_else(|| Failure::new("found no ranks, expected at least 1"))?;
    let mut threads = Vec::new();
    for end in ends {
        let (placement, rank) = (placement.clone(), end.rank());
        let work = move || {
            let device =
                |model: &Model| device(&placement, model, (rank, ranks)).map(|rank| rank.device);
            // Rank 0 hears of what goes wrong from the group.
            let _ = serve_rank(&end, &model_at, &device);
        };
        let thread = std::thread::Builder::new().name(format!("rank {rank}"));
        threads.push(thread.spawn(work)?);
    }
    Ok(Group {
        end: first,
        local: (0, ranks),
        members: Members::Threads(Mutex::new(threads)),
    })
}

/// Opens the device of a rank: its number on this machine, of so many.
fn device(
    placement: &PlacementArgs,
    model: &Model,
    (rank, local): (usize, usize),
) -> Result<RankDevice, Error> {
    let options: BackendOptions = placement.device.options();
    let options = rank_options(options, rank, local)?;
    RankDevice::open(placement.device.backend, model, options, (rank, local))
}

/// The model that rank 0 has at a path, which the machines of all ranks share.
fn model_at(path: &str) -> Result<Model, Error> {
    let source = match path {
        "" => ModelSource::Gguf(demo_model::demo()?),
        path => ModelSource::open(path)?,
    };
    read_model(source)
}

/// Where the other ranks find a model; empty for the one inside the program.
fn path_of(model: &Model) -> Outcome<String> {
    let path = match &model.source {
        source if source.identities().is_none() => Path::new(""),
        ModelSource::Gguf(gguf) => gguf.path(),
        ModelSource::Hf(folder) => &folder.dir,
    };
    if path == Path::new("") {
        return Ok(String::new());
    }
    let path = std::path::absolute(path)?;
    let text = path.to_str().map(str::to_owned);
    text.ok_or_else(|| {
        let path = path.display();
        Failure::new(format!(
            "{path}: this path is not UTF-8, so other ranks cannot be told it"
        ))
    })
}

/// Rank 0 of a model, on a device of this process, where there is a group.
pub(crate) fn place(placement: &PlacementArgs, model: &Model) -> Outcome<Option<Placement>> {
    let Some(Group { end, local, .. }) = GROUP.get() else {
        return Ok(None);
    };
    ferrum_engine::check_shard(model, end.size())?;
    let RankDevice { device, is_own } = device(placement, model, *local)?;
    let ranks = Ranks {
        end: end.clone(),
        local: local.1,
        own_devices: is_own,
        path: path_of(model)?,
    };
    Ok(Some(Placement::on(device, model).with_ranks(ranks)))
}

/// Does what rank 0 says, to its end.
pub(crate) fn follow(placement: Option<&PlacementArgs>) -> Outcome {
    let (Some(placement), Some(group)) = (placement, GROUP.get()) else {
        return Ok(());
    };
    let rank = group.end.rank();
    let device = |model: &Model| device(placement, model, group.local).map(|rank| rank.device);
    let served = serve_rank(&group.end, &model_at, &device);
    let Members::Processes(world) = &group.members else {
        return Ok(());
    };
    if let Err(error) = &served
        && !world.failure_is_from_peer()
    {
        ui::error(&format!("on rank {rank}: {error}"));
    }
    world.finalize();
    served.map_err(Failure::from)
}

/// Parts from the other ranks, if there are any. Where the group has ended, all processes end with it.
pub(crate) fn end(outcome: &Outcome) {
    let Some(Group { end, members, .. }) = GROUP.get() else {
        return;
    };
    if end.failure().is_none() {
        // A rank that is gone by now has nothing to do any more.
        let _ = shut_down_ranks(end);
    }
    match members {
        Members::Processes(world) => {
            if let Some((rank, reason)) = end.failure() {
                match outcome {
                    Err(failure) => ui::error(failure),
                    Ok(()) => ui::error(&format!("rank {rank} ended the group: {reason}")),
                }
            }
            world.finalize();
        }
        Members::Threads(threads) => {
            let mut threads = threads.lock().unwrap_or_else(PoisonError::into_inner);
            for thread in threads.drain(..) {
                // Its panic has ended the group.
                let _ = thread.join();
            }
        }
    }
}
