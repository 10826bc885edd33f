# The work of a client that has only generated stubs: check positions, cancel, resume,
# and read an error's details. Prints a JSON object of what came of it.
#
#   ruby -I build/stubs examples/protocol.rb 127.0.0.1:50050 "def fibonacci(n):"

require "json"
require "google/protobuf/well_known_types" # Any#is and Any#unpack
require "google/rpc/error_details_pb"
require "google/rpc/status_pb"
require "paceline/v1/orchestrator_service_services_pb"

# A generation in parts: what has been received, and how to ask for the rest.
class Generation
  attr_reader :token_ids, :text, :started, :finished

  def initialize(orchestrator, request)
    @orchestrator = orchestrator
    @request = request
    @token_ids = []
    @text = +""
  end

  # Streams what is missing, or so many chunks of it; what is received stays.
  def read(chunks: nil)
    call = @orchestrator.generate(next_request, deadline: Time.now + 60, return_op: true)
    call.execute.each do |response|
      add(response)
      chunks -= 1 if chunks && response.chunk
      break if chunks == 0
    end
    raise "the stream ended before its last message" unless @finished || chunks == 0
  ensure
    call&.cancel # leaving `each` does not
  end

  private

  def next_request
    return @request unless @started

    @request.dup.tap do |rest|
      rest.seed = @started.seed
      rest.resume_token_ids += @token_ids
    end
  end

  # An event of a newer server is nil here, and ignored.
  def add(response)
    case response.event
    when :started then start(response.started)
    when :chunk then append(response.chunk)
    when :finished then @finished = response.finished
    end
  end

  def start(started)
    same = @started.nil? || @started.model_fingerprint == started.model_fingerprint
    raise "the stream was resumed with another model" unless same

    @started = started
  end

  # Positions are absolute: they count the prompt.
  def append(chunk)
    due = @started.prompt_token_count + @token_ids.size
    raise "tokens at #{chunk.position} came where #{due} was due" unless chunk.position == due

    @token_ids.concat(chunk.token_ids.to_a)
    @text << chunk.text
  end
end

# The details of a server's error, beside its status code.
def details(error)
  types = [Google::Rpc::ErrorInfo, Google::Rpc::BadRequest, Google::Rpc::RetryInfo]
  found = (error.to_rpc_status&.details || []).filter_map do |detail|
    type = types.find { |each| detail.is(each) }
    detail.unpack(type).to_h if type
  end
  { code: error.code, message: error.details, details: found }
end

def refused(orchestrator, prompt)
  orchestrator.generate(Paceline::V1::GenerateRequest.new(text: prompt, max_tokens: 0)).to_a
rescue GRPC::BadStatus => e
  details(e)
end

unless ARGV.size == 2
  warn "usage: ruby -I build/stubs examples/protocol.rb HOST:PORT PROMPT"
  exit 2
end
address, prompt = ARGV
orchestrator = Paceline::V1::OrchestratorService::Stub.new(address, :this_channel_is_insecure)
request = Paceline::V1::GenerateRequest.new(text: prompt, max_tokens: 48)

whole = Generation.new(orchestrator, request)
whole.read

halves = Generation.new(orchestrator, request)
halves.read(chunks: 2)
left_after = halves.token_ids.size
halves.read

system = orchestrator.get_system_info(Paceline::V1::GetSystemInfoRequest.new)
room = system.context_length - whole.started.prompt_token_count
long = Paceline::V1::GenerateRequest.new(text: prompt, max_tokens: room, ignore_eos: true)
Generation.new(orchestrator, long).read(chunks: 3) # the rest is cancelled

puts JSON.generate(
  text: whole.text,
  token_ids: whole.token_ids,
  strategy: whole.started.strategy,
  finish_reason: whole.finished.finish_reason,
  statistics: whole.finished.statistics.to_h,
  resumed: { left_after: left_after, text: halves.text, token_ids: halves.token_ids },
  refused: refused(orchestrator, prompt),
  servers: system.servers.map(&:name)
)
