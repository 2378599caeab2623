//! Keeps the control process running.

use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::watch;

use crate::backoff::Backoff;
use crate::config::ControlConfig;
use crate::meter::Meter;

/// A process that lived so long was fine: the next failure starts with the first pause again.
const HEALTHY: Duration = Duration::from_secs(60);
/// How long it may take to end after `stop`, before it is killed.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// Starts the configured command and starts it again when it ends, until `stopping` is true; then waits for its end.
///
/// The command runs in a process group of its own, so that a terminal's interrupt reaches only us and we decide the
/// order; its standard input is a pipe that ends with this process.
pub async fn keep_running(config: ControlConfig, meter: Arc<dyn Meter>, mut stopping: watch::Receiver<bool>) {
    let Some((program, arguments)) = config.command.split_first() else { return };
    let mut pause = Backoff::new(config.restart_delay_s, config.restart_delay_s_max);
    while !*stopping.borrow_and_update() {
        let started = tokio::time::Instant::now();
        match start(program, arguments) {
            Ok(mut child) => {
                let input = child.stdin.take(); // waiting for a child would close it
                tokio::select! {
                    status = child.wait() => tracing::error!(status = describe(status), "the control process has ended"),
                    () = stopped(&mut stopping) => return end(child, input).await,
                }
            }
            Err(error) => tracing::error!(program, "the control process cannot be started: {error}"),
        }
        if started.elapsed() > HEALTHY {
            pause.reset();
        }
        meter.add("warmfront_control_restarts_total", &[], 1);
        tokio::select! {
            () = tokio::time::sleep(pause.grow()) => {}
            () = stopped(&mut stopping) => {}
        }
    }
}

/// Ready when `stopping` is true, or when nobody is left to say so.
async fn stopped(stopping: &mut watch::Receiver<bool>) {
    if stopping.wait_for(|stopping| *stopping).await.is_err() {
        tracing::debug!("nobody is left to stop the control process: stopping it");
    }
}

fn start(program: &str, arguments: &[String]) -> std::io::Result<Child> {
    let child =
        Command::new(program).args(arguments).stdin(Stdio::piped()).process_group(0).kill_on_drop(true).spawn()?;
    tracing::info!(pid = child.id(), "the control process is started");
    Ok(child)
}

/// It has been told to stop over the link; closing its standard input says so too.
async fn end(mut child: Child, input: Option<ChildStdin>) {
    drop(input);
    if let Ok(status) = tokio::time::timeout(END_TIMEOUT, child.wait()).await {
        tracing::info!(status = describe(status), "the control process has ended");
        return;
    }
    tracing::warn!("the control process does not end and is killed");
    if let Err(error) = child.kill().await {
        tracing::warn!("cannot kill the control process: {error}");
    }
}

fn describe(status: std::io::Result<ExitStatus>) -> String {
    status.map_or_else(|error| error.to_string(), |status| status.to_string())
}
