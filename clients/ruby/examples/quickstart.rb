require "paceline/v1/orchestrator_service_services_pb"

orchestrator = Paceline::V1::OrchestratorService::Stub.new("127.0.0.1:50050", :this_channel_is_insecure)
request = Paceline::V1::GenerateRequest.new(text: "def fibonacci(n):", max_tokens: 64)
finished = nil
orchestrator.generate(request, deadline: Time.now + 120).each do |response|
  print response.chunk.text if response.chunk
  finished = response.finished if response.finished
end
puts format("\nacceptance %.0f%%", finished.statistics.acceptance_rate * 100)
