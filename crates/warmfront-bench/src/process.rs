//! CPU time and memory of a process and all its descendants, from `/proc`.
//!
//! What one would get wrong: a router is several processes and many threads. `/proc/PID/stat` counts all threads of one
//! process; children are found by their parent's id. A child that ends inside the window is counted by its parent only
//! after the parent has waited for it, which the routers here do not do while under load.

use std::collections::HashMap;
use std::fs;

/// Clock ticks a second in `/proc/PID/stat`; fixed at 100 in the interface of every Linux architecture here.
const TICKS_PER_S: f64 = 100.0;
/// Bytes a page in `/proc/PID/statm` on x86-64 and most arm64 kernels.
const PAGE_BYTES: u64 = 4096;

/// What a set of process trees has used so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    pub cpu_s: f64,
    pub resident_bytes: u64,
    pub processes: usize,
}

struct Stat {
    parent: u32,
    cpu_ticks: u64,
    resident_pages: u64,
}

/// Sums over the given processes and everything below them; processes that are gone count nothing.
pub fn usage(roots: &[u32]) -> Usage {
    let table = table();
    let members: Vec<&Stat> =
        table.iter().filter(|(pid, _)| is_below(**pid, roots, &table)).map(|(_, stat)| stat).collect();
    Usage {
        cpu_s: members.iter().map(|stat| stat.cpu_ticks).sum::<u64>() as f64 / TICKS_PER_S,
        resident_bytes: members.iter().map(|stat| stat.resident_pages * PAGE_BYTES).sum(),
        processes: members.len(),
    }
}

fn table() -> HashMap<u32, Stat> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()));
    pids.filter_map(|pid| Some((pid, parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?))).collect()
}

fn is_below(pid: u32, roots: &[u32], table: &HashMap<u32, Stat>) -> bool {
    let ancestors = std::iter::successors(Some(pid), |pid| table.get(pid).map(|stat| stat.parent));
    ancestors.take(table.len() + 1).any(|pid| roots.contains(&pid))
}

/// Reads the fields after the command name, which is in parentheses and may hold anything.
fn parse(stat: &str) -> Option<Stat> {
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
    let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
    Some(Stat { parent: number(1)? as u32, cpu_ticks: number(11)? + number(12)?, resident_pages: number(21)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_name_with_spaces_and_parentheses_is_skipped() {
        let line = "7 (a) b (c)) S 3 7 7 0 -1 0 1 0 0 0 40 2 0 0 20 0 1 0 5 1000 12 18446744073709551615";
        let stat = parse(line).unwrap();
        assert_eq!((stat.parent, stat.cpu_ticks, stat.resident_pages), (3, 42, 12));
    }

    #[test]
    fn this_process_uses_memory_and_strangers_count_nothing() {
        let own = usage(&[std::process::id()]);
        assert!(own.processes >= 1 && own.resident_bytes > 0);
        assert_eq!(usage(&[]).processes, 0);
    }
}
