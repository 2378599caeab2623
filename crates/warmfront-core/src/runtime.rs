//! The data process put together: threads, signals, start and end.
//!
//! Two runtimes. *Front*: `io_threads` threads that accept and relay (one thread: a runtime without synchronisation).
//! *Background*: one thread for KV events, fleet and control link; there is hours' worth of CPU work in a backlog of
//! events, and on a thread of its own the operating system can take the processor from it whenever a stream has something
//! to do. The deciding thread belongs to the caller: it loops over [`Service::receive`] and [`Service::command`].
//!
//! The end, in this order: tell the router, and fail readiness; stop accepting after the settle time; let running answers
//! end, at most for the grace time; close the queues, so that the deciding thread drains them and gets `None`; end the
//! control process and the background. A second signal skips what is left of it.

mod change;
mod questions;

use std::net::SocketAddr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpSocket};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Notify, watch};

use crate::clock::Clock;
use crate::config::CoreConfig;
use crate::control::{Control, keep_running};
use crate::error::CoreError;
use crate::fleet::{Fleet, FleetState, FleetUpdate, FleetView, Means, encode};
use crate::handover::{self, Claim};
use crate::http::{Front, Fronts, Outset, Preparer, Stop, serve};
use crate::mailbox::{Event, Mailbox, Received, RequestId, Slot};
use crate::memory::{Memory, Parts};
use crate::meter::Meter;
use crate::metrics::Metrics;
use crate::overlap::PoolOverlap;
use crate::requests::RequestTable;
use crate::tokenize::{LoadOptions, SegmentCache, Tokenizer};

/// How long [`Service::receive`] waits at a time; the deciding thread sees signals of its own language in between.
const RECEIVE_WAIT: Duration = Duration::from_millis(500);
/// Connections that may wait to be accepted. With the usual 128 a burst of clients overflows it while the thread decodes
/// one large body, and who overflows waits a second for his next try. The kernel may cap it (`net.core.somaxconn`).
const BACKLOG: u32 = 4096;
/// Tasks that the front polls before it asks the kernel for new arrivals: with tokio's 61 a request lies unread behind half
/// a millisecond of other streams' tokens; asking costs a fraction of a task.
const TASKS_BETWEEN_SOCKETS: u32 = 16;
/// Tasks that the front polls before it looks for what other threads have woken, such as who carries their decisions.
const TASKS_BETWEEN_THREADS: u32 = 8;
/// How long the background may take to end after the front has.
const END_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the last snapshot may take, in the time that whoever stops us leaves.
const LAST_SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(5);
/// A router that does not tell its calibration in this time is not waited for.
const CALIBRATION_TIMEOUT: Duration = Duration::from_secs(5);

/// A running data process. Dropping it stops it without grace.
pub struct Service {
    shared: Arc<Shared>,
    address: SocketAddr,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// What all parts of the process use.
struct Shared {
    config: CoreConfig,
    clock: Clock,
    metrics: Arc<Metrics>,
    mailbox: Arc<Mailbox>,
    requests: Arc<RequestTable>,
    preparer: Arc<Preparer>,
    fronts: Fronts,
    view: Arc<ArcSwap<FleetView>>,
    outset: Arc<Outset>,
    /// Already tokenized pieces of prompts, for all tokenizers.
    segments: Arc<SegmentCache>,
    /// What outlives this process.
    memory: Arc<Memory>,
    /// Stops accepting.
    stop: Stop,
    /// Somebody has asked for the end: a signal or a call, and no process that took over.
    is_stop_asked: AtomicBool,
    /// Accepting may begin; told at once unless the socket is another process's.
    begin: Notify,
    /// The listening socket once more, to be offered to the next process.
    socket: Mutex<Option<OwnedFd>>,
    /// The configuration is to be read again.
    reloads: Arc<Notify>,
    /// Why the process ends although nobody asked it to.
    failure: Mutex<Option<String>>,
    /// Ends everything at once.
    halt: Notify,
    /// `true`: the background ends.
    ended: watch::Sender<bool>,
    /// A thread has panicked.
    panicked: AtomicBool,
}

impl Service {
    /// Binds the sockets, then starts all threads.
    ///
    /// # Errors
    ///
    /// An address or the control socket cannot be bound, a file of keys or certificates cannot be read (the error names
    /// it), or threads cannot be started.
    pub fn start(config: CoreConfig) -> Result<Self, CoreError> {
        let front = front_runtime(&config)?;
        let failed = |source| CoreError::Listen { address: config.front.listen.clone(), source };
        let (listener, claim) = socket(&front, &config).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let offered = config.front.handover.as_ref().map(|_| listener.as_fd().try_clone_to_owned()).transpose();
        let offered = offered.map_err(failed)?;
        let shared = Arc::new(Shared::new(config)?);
        *shared.socket.lock() = offered;
        if claim.is_none() {
            shared.begin.notify_one();
        }
        let background = Background::prepare(Arc::clone(&shared), address, claim)?;
        let front_shared = Arc::clone(&shared);
        let threads = vec![
            spawn("warmfront-front", &shared, move || run_front(&front, listener, &front_shared))?,
            spawn("warmfront-events", &shared, move || background.run())?,
        ];
        tracing::info!("serving on {address}");
        Ok(Self { shared, address, threads: Mutex::new(threads) })
    }

    /// Where clients are served; the port is the real one when 0 was asked for.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The next batch of events, encoded; `None` when the process has ended and everything has been handed out.
    ///
    /// Waits; an empty batch says that nothing happened for a while.
    pub fn receive(&self) -> Option<Vec<u8>> {
        match self.shared.mailbox.receive(RECEIVE_WAIT) {
            Received::Events(events) => Some(events),
            Received::Nothing => Some(Vec::new()),
            Received::Closed => None,
        }
    }

    /// A thread of the core has panicked, which is why [`Service::receive`] says `None`.
    pub fn has_panicked(&self) -> bool {
        self.shared.panicked.load(Ordering::Acquire)
    }

    /// Why the process has ended although nobody asked it to, once [`Service::receive`] says `None`.
    pub fn failure(&self) -> Option<String> {
        self.shared.failure.lock().clone()
    }

    /// Takes a batch of encoded commands.
    pub fn command(&self, commands: &[u8]) -> Result<(), CoreError> {
        self.shared.mailbox.command(commands)
    }

    /// What each replica of the request's pool holds of its prompt.
    pub fn overlap(&self, id: RequestId) -> Result<PoolOverlap, CoreError> {
        let prompt = self.shared.requests.get(id)?;
        let view = self.shared.view.load();
        let pool = view.pool(&prompt.pool).ok_or(CoreError::UnknownRequest(id))?;
        Ok(PoolOverlap::of(&prompt, pool, self.shared.clock.now_s()))
    }

    /// The router has chosen `slot`: the prompt's blocks are in use there and predicted to be held.
    pub fn dispatched(&self, id: RequestId, slot: Slot) -> Result<(), CoreError> {
        self.shared.requests.dispatched(id, slot)
    }

    /// The snapshot that requests see now.
    pub fn fleet(&self) -> Arc<FleetView> {
        self.shared.view.load_full()
    }

    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.shared.metrics
    }

    /// Stops as a termination signal does. Returns at once; a second call ends without grace.
    pub fn stop(&self) {
        self.shared.stop_or_halt();
    }

    /// Waits for the end of all threads.
    pub fn join(&self) {
        for thread in self.threads.lock().drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of the core panicked");
            }
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.shared.stop.set();
        self.shared.halt.notify_one();
        self.join();
    }
}

impl Shared {
    fn new(config: CoreConfig) -> Result<Self, CoreError> {
        let clock = Clock::start();
        let metrics = Arc::new(Metrics::new(&config.metrics, config.label_values_max));
        metrics.set("warmfront_build_info", &[env!("CARGO_PKG_VERSION")], 1.0);
        let mailbox = Arc::new(Mailbox::new(clock, config.queues.clone(), &metrics));
        let view = Arc::new(ArcSwap::from_pointee(FleetView::unknown()));
        let requests = Arc::new(RequestTable::new(Arc::clone(&view), clock));
        let compute_threads = compute_threads(&config);
        let preparer =
            Arc::new(Preparer::new((&config.index, &config.session), compute_threads, clock, Arc::clone(&metrics)));
        let segments = Arc::new(SegmentCache::new(config.index.segment_cache_bytes));
        let memory = Arc::new(Memory::new(config.snapshot.clone(), memory_parts(&config, &mailbox, &view, &metrics)));
        let outset = Arc::<Outset>::default();
        let (ended, _) = watch::channel(false);
        let front = Front::new(
            (config.front.clone(), config.upstream.clone()),
            (Arc::clone(&view), Arc::clone(&outset)),
            (Arc::clone(&mailbox), Arc::clone(&requests)),
            Arc::clone(&preparer),
            Arc::clone(&metrics),
        )?;
        Ok(Self {
            config,
            clock,
            metrics,
            mailbox,
            requests,
            preparer,
            fronts: Fronts::from(Arc::new(front)),
            view,
            outset,
            segments,
            memory,
            stop: Stop::default(),
            is_stop_asked: AtomicBool::new(false),
            begin: Notify::new(),
            socket: Mutex::default(),
            reloads: Arc::default(),
            failure: Mutex::default(),
            halt: Notify::new(),
            ended,
            panicked: AtomicBool::new(false),
        })
    }

    /// The first time in order, the second at once. Where another process has taken over, the first changes nothing:
    /// running answers have the grace time that began then.
    fn stop_or_halt(&self) {
        if self.is_stop_asked.swap(true, Ordering::AcqRel) {
            self.halt.notify_one();
        } else if !self.stop.is_set() {
            self.tell_stopping();
            self.stop.set();
        }
    }

    /// Another process accepts from now on.
    fn hand_over(&self) {
        if !self.stop.is_set() {
            self.tell_stopping();
            self.stop.hand_over();
        }
    }

    fn tell_stopping(&self) {
        let (time_s, grace_s) = (self.clock.now_s(), self.fronts.current().config().grace_s);
        self.metrics.set("warmfront_draining", &[], 1.0);
        self.mailbox.push(Event::Stopping { time_s, grace_s });
    }

    fn fail(&self, reason: String) {
        *self.failure.lock() = Some(reason);
        self.stop.set();
        self.halt.notify_one();
    }
}

/// What memory works with. Files that live no longer than the process lie beside its socket, in a private folder.
fn memory_parts(
    config: &CoreConfig,
    mailbox: &Arc<Mailbox>,
    view: &Arc<ArcSwap<FleetView>>,
    metrics: &Arc<Metrics>,
) -> Parts {
    let router = Arc::clone(mailbox);
    let calibrate =
        move |question: &'static str, payload: Bytes| -> Pin<Box<dyn Future<Output = Option<Bytes>> + Send>> {
            let asked = router.ask(question, None, payload);
            Box::pin(async move {
                let answer = tokio::time::timeout(CALIBRATION_TIMEOUT, asked.ok()?).await.ok()?.ok()?;
                (answer.status == 200).then_some(answer.body)
            })
        };
    let spool = match Path::new(&config.control.socket).parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => std::env::temp_dir(),
    };
    Parts {
        clock: mailbox.clock(),
        meter: Arc::clone(metrics) as _,
        view: Arc::clone(view),
        calibrate: Arc::new(calibrate),
        seed: config.index.seed,
        approximate_ttl_s: config.index.approximate_ttl_s,
        spool,
    }
}

fn compute_threads(config: &CoreConfig) -> usize {
    match config.front.compute_threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        threads => threads,
    }
}

fn front_runtime(config: &CoreConfig) -> Result<Runtime, CoreError> {
    let mut builder = match config.front.io_threads {
        0 | 1 => Builder::new_current_thread(),
        threads => {
            let mut builder = Builder::new_multi_thread();
            builder.worker_threads(threads);
            builder
        }
    };
    builder.event_interval(TASKS_BETWEEN_SOCKETS).global_queue_interval(TASKS_BETWEEN_THREADS);
    builder.max_blocking_threads(compute_threads(config)).enable_all();
    builder.thread_name("warmfront-front").build().map_err(|error| no_threads(&error))
}

fn no_threads(error: &std::io::Error) -> CoreError {
    CoreError::Config(format!("threads cannot be started: {error}"))
}

/// The listening socket: of the process before, of systemd, or a new one.
fn socket(runtime: &Runtime, config: &CoreConfig) -> std::io::Result<(TcpListener, Option<Claim>)> {
    let listen_at = config.front.listen.as_str();
    let claim = config.front.handover.as_deref().map(|path| Claim::make(path, listen_at)).transpose()?.flatten();
    let given = match &claim {
        Some(claim) => Some(claim.listener.try_clone()?),
        None => handover::from_systemd()?,
    };
    let _runtime = runtime.enter();
    let listener = match given {
        Some(listener) => {
            listener.set_nonblocking(true)?;
            TcpListener::from_std(listener)?
        }
        None => runtime.block_on(listen(listen_at))?,
    };
    Ok((listener, claim))
}

/// Listens at the first address that a name stands for and that can be bound.
async fn listen(address: &str) -> std::io::Result<TcpListener> {
    let mut last = std::io::Error::new(std::io::ErrorKind::InvalidInput, "the name stands for no address");
    for candidate in tokio::net::lookup_host(address).await? {
        match listen_at(candidate) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn listen_at(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?; // a restart does not wait for connections of the last run
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

fn spawn(name: &str, shared: &Arc<Shared>, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, CoreError> {
    let guard = EndGuard(Arc::clone(shared));
    let work = move || {
        let guard = guard;
        work();
        drop(guard);
    };
    std::thread::Builder::new().name(name.into()).spawn(work).map_err(|error| no_threads(&error))
}

/// Ends the process when a thread of it panics: a router that has lost one lives on, deaf to signals or to events.
struct EndGuard(Arc<Shared>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.panicked.store(true, Ordering::Release);
            self.0.stop.set();
            self.0.halt.notify_one();
            self.0.mailbox.close();
            self.0.ended.send_replace(true);
        }
    }
}

fn run_front(runtime: &Runtime, listener: TcpListener, shared: &Arc<Shared>) {
    let served = async {
        tokio::select! {
            () = shared.begin.notified() => serve(listener, shared.fronts.clone(), shared.stop.clone()).await,
            () = shared.stop.wait() => {} // before anything was accepted
        }
    };
    runtime.block_on(async {
        tokio::select! {
            () = served => tracing::info!("all answers have ended"),
            () = shared.halt.notified() => tracing::warn!("ending at once"),
        }
    });
    shared.mailbox.close();
    shared.ended.send_replace(true);
}

/// Everything that is not in the way of a request.
struct Background {
    shared: Arc<Shared>,
    runtime: Runtime,
    fleet: Fleet,
    control: Option<Control>,
    updates: watch::Sender<FleetUpdate>,
    states: watch::Receiver<Bytes>,
    signals: change::Signals,
    claim: Option<Claim>,
}

impl Background {
    fn prepare(shared: Arc<Shared>, address: SocketAddr, claim: Option<Claim>) -> Result<Self, CoreError> {
        let runtime = Builder::new_current_thread().enable_all().build().map_err(|error| no_threads(&error))?;
        let guard = runtime.enter();
        let (states, states_receiver) = watch::channel(encode(&FleetState::default()));
        let (updates, _) = watch::channel(FleetUpdate::default());
        let meter: Arc<dyn Meter> = Arc::clone(&shared.metrics) as _;
        let means = Means {
            clock: shared.clock,
            index: shared.config.index.clone(),
            kv: shared.config.kv.clone(),
            meter,
            segments: Arc::clone(&shared.segments),
            changed: Arc::new(Notify::new()),
            memory: Arc::clone(&shared.memory),
        };
        let (mailbox, outset) = (Arc::clone(&shared.mailbox), Arc::clone(&shared.outset));
        let tell = Box::new(move |state: &FleetState| {
            let fleet = encode(state);
            mailbox.push(Event::FleetChanged { time_s: mailbox.clock().now_s(), fleet: fleet.clone() });
            outset.tell(state.version);
            states.send_replace(fleet);
        });
        let options = LoadOptions { cache: Arc::clone(&shared.segments), ..LoadOptions::default() };
        let load = move |path: &Path, template: &_| {
            Tokenizer::load_with(path, template, options.clone()).map_err(|error| error.to_string())
        };
        let fleet = Fleet::new(means, Arc::clone(&shared.view), Arc::new(load), tell);
        let socket = &shared.config.control.socket;
        let control = match socket.as_str() {
            "" => None,
            path => Some(Control::bind(path, &address.to_string(), updates.clone(), questions::answerer(&shared))?),
        };
        let signals = change::Signals::listen()?;
        drop(guard);
        Ok(Self { shared, runtime, fleet, control, updates, states: states_receiver, signals, claim })
    }

    fn run(self) {
        let Self { shared, runtime, fleet, control, updates, states, signals, claim } = self;
        let config = shared.config.control.clone();
        let meter: Arc<dyn Meter> = Arc::clone(&shared.metrics) as _;
        runtime.block_on(async {
            let process = tokio::spawn(keep_running(config, meter, shared.ended.subscribe()));
            let fleet = tokio::spawn(fleet.run(updates.subscribe()));
            let link = control.map(|control| tokio::spawn(control.run(states, Arc::clone(&shared.reloads))));
            let handing = tokio::spawn({
                let shared = Arc::clone(&shared);
                async move { change::hand_over(&shared, claim).await }
            });
            let memory = Arc::clone(&shared.memory);
            tokio::spawn(async move { memory.look().await });
            let keeper = tokio::spawn(Arc::clone(&shared.memory).keep(shared.stop.clone(), shared.ended.subscribe()));
            let mut ended = shared.ended.subscribe();
            tokio::select! {
                _ = ended.wait_for(|ended| *ended) => {}
                () = signals.obey(&shared) => {}
            }
            handing.abort();
            if tokio::time::timeout(LAST_SNAPSHOT_TIMEOUT, keeper).await.is_err() {
                tracing::warn!("the last snapshot takes too long; the one before stays");
            }
            fleet.abort(); // ends the sender of states, so the link says `stop`
            if let Err(error) = process.await {
                tracing::error!("watching the control process failed: {error}");
            }
            if let Some(link) = link {
                link.abort();
                let _aborted = link.await; // removes the socket
            }
        });
        runtime.shutdown_timeout(END_TIMEOUT);
    }
}

#[cfg(test)]
mod tests;
